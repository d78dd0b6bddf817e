"""Images as rows of pixels, one byte a token, from MNIST's idx files or from a data set of the hub.

A row is <s> and all pixels from the first line to the last (a pixel's channels follow each other); each value is
predicted from those before it. A missing validation split is held out at the end of the training split.
"""

import gzip
import hashlib
import pathlib
import zlib

import numpy as np

from flash_lm.config import DataConfig
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.tokenizers import SPECIALS, ByteTokenizer
from flash_lm.errors import InputError

_FILES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
_MAGIC = (0, 0, 8, 3)  # bytes, in three dimensions
_HELD_OUT = 12  # the validation split gets one image in this many of the training split


class Images:
    """One split of images.

    Attributes:
        pixels: N×…, uint8: images, lines, columns, and channels if there are any.
    """

    def __init__(self, pixels: np.ndarray):
        """Uses the images as they are."""
        self.pixels = pixels
        self.longest = pixels[0].size

    def __len__(self) -> int:
        """The number of images."""
        return len(self.pixels)

    def example(self, number: int, length: int) -> Example:
        """An image; the row's length does not matter."""
        del length
        values = self.pixels[number].reshape(-1).astype(np.int32)
        return Example(np.concatenate([[ByteTokenizer.begin], values + len(SPECIALS)]).astype(np.int32), given=1)


def images(config: DataConfig) -> ExampleCorpus:
    """The images in the folder `data.path`, or of `data.name` on the hub.

    Raises:
        InputError: no such files or data set, or files of another kind.
    """
    found, name = _of_hub(config) if config.name else _of_files(config.path)
    if len(found["train"]) < _HELD_OUT:
        raise InputError(f"{name} has {len(found['train'])} images to train on: give {_HELD_OUT} or more")
    if "validation" not in found:
        kept = len(found["train"]) - len(found["train"]) // _HELD_OUT
        found["train"], found["validation"] = found["train"][:kept], found["train"][kept:]
    if empty := [split for split in SPLITS if not len(found[split])]:
        raise InputError(f"{name} has no image for {', '.join(empty)}: give one or more")
    digest = hashlib.sha256()
    for split in SPLITS:
        digest.update(f"{split} {found[split].shape}".encode())
        digest.update(found[split].tobytes())
    splits = {split: Images(found[split]) for split in SPLITS}
    return ExampleCorpus(name, digest.hexdigest(), ByteTokenizer(), splits)


def _of_files(path: str) -> tuple[dict[str, np.ndarray], str]:
    folder = pathlib.Path(path).expanduser()
    found = {split: _read_idx(folder, name) for split, name in _FILES.items()}
    _check_one_size(str(folder), {images.shape[1:] for images in found.values()})
    return found, folder.name


def _check_one_size(where: str, shapes: set[tuple[int, ...]]) -> None:
    if len(shapes) > 1:
        listed = " and ".join("×".join(map(str, shape)) for shape in sorted(shapes)[:3])
        raise InputError(f"the images of {where} have {listed} values: all must have the same size")


def _read_idx(folder: pathlib.Path, name: str) -> np.ndarray:
    """Reads N×lines×columns from an idx file, which may be compressed."""
    for file, opened in ((folder / f"{name}.gz", gzip.open), (folder / name, open)):
        if not file.exists():
            continue
        try:
            with opened(file, "rb") as stream:
                data: bytes = stream.read()  # type: ignore[assignment]
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"cannot read {file}: {error}") from None
        sizes = np.frombuffer(data[4:16].ljust(12, b"\0"), ">i4")
        if tuple(data[:4]) != _MAGIC or len(data) != 16 + sizes.prod(dtype=np.int64):
            raise InputError(f"{file} is not an idx file of images, or is damaged: download it again")
        return np.frombuffer(data, np.uint8, offset=16).reshape(sizes)
    raise InputError(f"{folder} has no {name} or {name}.gz: give the folder of MNIST's idx files in --config.data.path")


def _of_hub(config: DataConfig) -> tuple[dict[str, np.ndarray], str]:
    """From a column `image` or `img`, as MNIST and CIFAR-10 have there."""
    import datasets  # noqa: PLC0415 (slow to import)

    name = config.name
    try:
        found = datasets.load_dataset(name, config.config)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot load data.name={name}: {str(error).splitlines()[0]}") from None
    columns = set.intersection(*(set(split.column_names) for split in found.values()))
    column = next((x for x in ("image", "img") if x in columns), None)
    if column is None or not {"train", "test"} <= set(found):
        raise InputError(
            f"data.name={name} needs splits train and test with a column image or img, and has "
            f"{', '.join(map(str, found))} with {', '.join(sorted(columns)) or 'no column in common'}"
        )
    # Loaded images are PIL images, which NumPy reads as arrays.
    arrays = {x: [np.asarray(row, np.uint8) for row in found[x][column]] for x in SPLITS if x in found}
    _check_one_size(f"data.name={name}", {row.shape for rows in arrays.values() for row in rows})
    return {x: np.stack(rows) for x, rows in arrays.items()}, name.replace("/", "--")
