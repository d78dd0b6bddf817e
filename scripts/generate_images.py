"""Draws images with a run trained on images: samples, and test images with their lower halves generated again.

    python scripts/generate_images.py --workdir=runs/mnist_small --out=studies/tasks/results/mnist

OUT gets samples.png, a square grid, and completions.png: in each row the given half, two completions and the original.
"""

import argparse
import importlib.util
import math
import pathlib

import numpy as np

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.config.registry import CORPORA
from flash_lm.data.images import Images
from flash_lm.data.splits import load_splits
from flash_lm.errors import InputError, missing_package
from flash_lm.inference.images import ImageGenerator
from flash_lm.inference.model import load_model

_BORDER = 2  # pixels between images
_GREY = 128  # pixels that are not given


def grid(images_NxHxWx: np.ndarray, columns: int) -> np.ndarray:
    """Arranges images in a grid, with white between them.

    Args:
        images_NxHxWx: uint8; N a multiple of `columns`.
        columns: images in a line.
    """
    rest = [(0, 0)] * (images_NxHxWx.ndim - 3)
    framed = np.pad(images_NxHxWx, [(0, 0), (0, _BORDER), (0, _BORDER), *rest], constant_values=255)
    count, height, width = framed.shape[:3]
    cells = framed.reshape(count // columns, columns, height, width, *framed.shape[3:])
    lines = np.swapaxes(cells, 1, 2).reshape(count // columns * height, columns * width, *framed.shape[3:])
    return np.pad(lines, [(_BORDER, 0), (_BORDER, 0), *rest], constant_values=255)


def write_png(path: pathlib.Path, image: np.ndarray) -> None:
    """Writes a grey or colour image; creates the folder if necessary."""
    import matplotlib.image  # noqa: PLC0415 (an extra, and slow to import)

    path.parent.mkdir(parents=True, exist_ok=True)
    matplotlib.image.imsave(path, image, cmap="gray", vmin=0, vmax=255)


def main(argv: list[str]) -> None:
    """Draws with the newest checkpoint of a run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workdir", required=True, metavar="RUN[@best|@STEP]", help="the run's folder")
    parser.add_argument("--samples", type=positive, default=64, help="new images; a square number")
    parser.add_argument("--completed", type=positive, default=8, help="test images whose lower half is generated again")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the most likely value")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--out", required=True, type=local_path, help="folder to write")
    add_plugins_flag(parser)
    arguments = parser.parse_args(argv)
    use_plugins(arguments)
    # Requirements: a square grid, matplotlib, a model of images.
    columns = math.isqrt(arguments.samples)
    if columns**2 != arguments.samples:
        raise InputError(f"--samples={arguments.samples} must be a square number, such as {columns**2}")
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_package("matplotlib", "plot")
    trained = load_model(arguments.workdir)
    if CORPORA[trained.config.data.corpus].answers != "images":
        raise InputError(f"{trained.name} was not trained on images: train a model with configs/mnist.py")
    test = load_splits(trained.config.data).splits["test"]
    assert isinstance(test, Images)
    # Samples, then completions of the upper halves of test images.
    generator = ImageGenerator(trained, test.pixels.shape[1:])
    settings = {"temperature": arguments.temperature, "seed": arguments.seed}
    write_png(arguments.out / "samples.png", grid(generator.draw(arguments.samples, **settings), columns))
    originals = test.pixels[: arguments.completed]
    half = originals.shape[1] // 2
    flat = originals[:, :half].reshape(len(originals), -1)
    completed = generator.complete(np.repeat(flat, 2, axis=0), **settings)
    upper_halves = originals.copy()
    upper_halves[:, half:] = _GREY
    rows = np.stack([upper_halves, completed[::2], completed[1::2], originals], axis=1)
    write_png(arguments.out / "completions.png", grid(rows.reshape(-1, *originals.shape[1:]), 4))
    print(f"{arguments.out}/samples.png and completions.png")


if __name__ == "__main__":
    run(main)
