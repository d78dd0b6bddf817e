"""Images as rows of pixels, one byte per token, from MNIST's idx files or from a data set of the hub.

A row is <s> and all pixels from the first line to the last (a pixel's channels follow each other); each value is
predicted from those before it, or all of them together predict the image's label. Images may also be files in a folder,
train/LABEL/NAME.png. A missing validation split is held out at the end of the training split.
"""

import gzip
import hashlib
import pathlib
import zlib
from typing import Any, NamedTuple

import numpy as np

from flash_lm.config.data import DataConfig
from flash_lm.config.keys import key, section
from flash_lm.data.corpora import CorpusKind, needs_one_source
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.tokenizer import SPECIALS, ByteTokenizer
from flash_lm.errors import InputError

_FILES = {"train": "train-{}-ubyte", "test": "t10k-{}-ubyte"}
_IMAGES, _LABELS = "images-idx3", "labels-idx1"  # bytes in three dimensions, and in one
_HELD_OUT = 12  # the validation split gets one image in this many of the training split


@section("data.images")
class ImageOptions:
    """Options of data.corpus=images."""

    gray: bool = key(False, "one value a pixel, its luma, instead of its channels; not of idx files, which have one")


class Images:
    """One split of images.

    Attributes:
        pixels: N×…, uint8: images, lines, columns, and perhaps channels.
        labels: N int32; None: no labels.
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray | None = None):
        """Uses the images as they are."""
        self.pixels, self.labels = pixels, labels
        self.longest = pixels[0].size

    def __len__(self) -> int:
        """The number of images."""
        return len(self.pixels)

    def example(self, number: int, length: int) -> Example:
        """An image; the row's length does not matter."""
        del length
        values = self.pixels[number].reshape(-1).astype(np.int32)
        ids = np.concatenate([[ByteTokenizer.begin], values + len(SPECIALS)]).astype(np.int32)
        return Example(ids, label=None if self.labels is None else int(self.labels[number]))


class _LoadedImages(NamedTuple):
    """Pixels and labels by split, as loaded, and the labels' names, which may be missing.

    `sorted`: its images come label by label.
    """

    name: str
    pixels: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    names: tuple[str, ...] = ()
    sorted: bool = False


def images(config: DataConfig, options: ImageOptions) -> ExampleCorpus:
    """Loads the images in the folder `data.path`, or of `data.name` on the hub.

    Raises:
        InputError: no such files or data set, or files of another kind.
    """
    loaded = _load_from_hub(config, options) if config.name else _load_from_folder(config, options)
    pixels, labels = loaded.pixels, loaded.labels
    if len(pixels["train"]) < _HELD_OUT:
        raise InputError(f"{loaded.name} has {len(pixels['train'])} images to train on: give {_HELD_OUT} or more")
    if "validation" not in pixels:
        # Held-out images are spread evenly if the images are sorted by label.
        held = _held_out(len(pixels["train"]), loaded.sorted)
        for arrays in (pixels, labels) if labels else (pixels,):
            arrays["train"], arrays["validation"] = arrays["train"][~held], arrays["train"][held]
    if empty := [split for split in SPLITS if not len(pixels[split])]:
        raise InputError(f"{loaded.name} has no image for {', '.join(empty)}: give one or more")
    digest = hashlib.sha256()  # of the pixels alone, as in runs that are older than labels
    for split in SPLITS:
        digest.update(f"{split} {pixels[split].shape}".encode())
        digest.update(pixels[split].tobytes())
    splits = {split: Images(pixels[split], labels.get(split)) for split in SPLITS}
    return ExampleCorpus(loaded.name, digest.hexdigest(), ByteTokenizer(), splits, loaded.names)


def _held_out(count: int, spread: bool) -> np.ndarray:
    """A mask of the training images for validation, (count,) bool: the last ones, or some that are spread evenly."""
    held, size = np.zeros(count, bool), count // _HELD_OUT
    held[np.linspace(0, count - 1, size).astype(np.int64) if spread else np.arange(count - size, count)] = True
    return held


def _load_from_folder(config: DataConfig, options: ImageOptions) -> _LoadedImages:
    folder = pathlib.Path(config.path).expanduser()
    if (folder / "train").is_dir():
        loaded = _load_dataset(f"data.path={config.path}", folder.name, options, "imagefolder", data_dir=str(folder))
        return loaded._replace(sorted=True)
    # Otherwise the folder has MNIST's idx files; labels are optional.
    pixels, labels = {}, {}
    for split, name in _FILES.items():
        pixels[split] = _read_idx(folder, name.format(_IMAGES), dimensions=3)
        if any((folder / f"{name.format(_LABELS)}{suffix}").exists() for suffix in ("", ".gz")):
            labels[split] = _read_idx(folder, name.format(_LABELS), dimensions=1).astype(np.int32)
            if len(labels[split]) != len(pixels[split]):
                raise InputError(
                    f"{folder} has {len(pixels[split])} images and {len(labels[split])} labels for {split}: download "
                    "them again"
                )
    _check_one_size(str(folder), {images.shape[1:] for images in pixels.values()})
    if labels.keys() != pixels.keys():
        return _LoadedImages(folder.name, pixels, {})
    count = 1 + max(int(values.max(initial=0)) for values in labels.values())
    return _LoadedImages(folder.name, pixels, labels, tuple(map(str, range(count))))


def _check_one_size(where: str, shapes: set[tuple[int, ...]]) -> None:
    if len(shapes) > 1:
        listed = " and ".join("×".join(map(str, shape)) for shape in sorted(shapes)[:3])
        raise InputError(f"the images of {where} have {listed} values: all must have the same size")


def _read_idx(folder: pathlib.Path, name: str, dimensions: int) -> np.ndarray:
    """Reads an array of bytes from an idx file, which may be compressed."""
    # The header has two zeros, the type, the number of dimensions, and the sizes as big-endian int32.
    header = 4 + 4 * dimensions
    for file, opened in ((folder / f"{name}.gz", gzip.open), (folder / name, open)):
        if not file.exists():
            continue
        try:
            with opened(file, "rb") as stream:
                data: bytes = stream.read()  # type: ignore[assignment]
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"cannot read {file}: {error}") from None
        sizes = np.frombuffer(data[4:header].ljust(header - 4, b"\0"), ">i4")
        if tuple(data[:4]) != (0, 0, 8, dimensions) or len(data) != header + sizes.prod(dtype=np.int64):
            what = "images" if dimensions > 1 else "labels"
            raise InputError(f"{file} is not an idx file of {what}, or is damaged: download it again")
        return np.frombuffer(data, np.uint8, offset=header).reshape(sizes)
    raise InputError(f"{folder} has no {name} or {name}.gz: give the folder of MNIST's idx files in --config.data.path")


def _load_from_hub(config: DataConfig, options: ImageOptions) -> _LoadedImages:
    name = config.name.replace("/", "--")
    return _load_dataset(f"data.name={config.name}", name, options, config.name, config.config)


def _load_dataset(what: str, name: str, options: ImageOptions, *location: Any, **more: Any) -> _LoadedImages:
    """Loads a column `image` or `img`, and perhaps `label`, as MNIST and CIFAR-10 have on the hub."""
    import datasets  # noqa: PLC0415 (slow to import)

    try:
        dataset = datasets.load_dataset(*location, **more)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot load {what}: {str(error).splitlines()[0]}") from None
    columns = set.intersection(*(set(split.column_names) for split in dataset.values()))
    column = next((x for x in ("image", "img") if x in columns), None)
    if column is None or not {"train", "test"} <= set(dataset):
        raise InputError(
            f"{what} needs splits train and test with a column image or img, and has "
            f"{', '.join(map(str, dataset))} with {', '.join(sorted(columns)) or 'no column in common'}"
        )
    # Decode the images; those of all splits must have one size.
    splits = {split: dataset[split] for split in SPLITS if split in dataset}
    try:
        arrays = {split: [_pixels(image, options) for image in rows[column]] for split, rows in splits.items()}
    except (OSError, ValueError) as error:
        raise InputError(f"{what} has an image that cannot be read: {error}") from None
    _check_one_size(what, {row.shape for rows in arrays.values() for row in rows})
    pixels = {split: np.stack(rows) for split, rows in arrays.items()}
    # Labels are used only if the data set names them.
    names = getattr(dataset["train"].features.get("label"), "names", None)
    if "label" not in columns or names is None:
        return _LoadedImages(name, pixels, {})
    labels = {split: np.array(rows["label"], np.int32) for split, rows in splits.items()}
    if without := [split for split, values in labels.items() if (values < 0).any()]:
        raise InputError(f"{what} has images without a label in {', '.join(without)}: leave them out")
    return _LoadedImages(name, pixels, labels, tuple(names))


def _pixels(image: Any, options: ImageOptions) -> np.ndarray:
    """The values of a loaded (PIL) image: its luma, or its channels. Some data sets have arrays instead."""
    if not hasattr(image, "mode"):
        return np.asarray(image, np.uint8)
    kept = image.mode == "L" or (image.mode == "RGB" and not options.gray)
    return np.asarray(image if kept else image.convert("L" if options.gray else "RGB"), np.uint8)


IMAGES = CorpusKind(
    lambda config, known, options: images(config, options),
    examples=True,
    tokenizer=ByteTokenizer(),
    answers="images",
    labelled=lambda config: True,
    endings=("-ubyte", "-ubyte.gz"),
    ends_in_values=True,
    sections=(ImageOptions,),
    problems=needs_one_source,
)
