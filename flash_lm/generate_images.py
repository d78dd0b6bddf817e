"""flash-lm generate-images runs/mnist_small --out=runs/images [--samples=64 --completed=8]."""

import argparse
import importlib.util
import math

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.errors import InputError, missing_package

_GREY = 128  # pixels that are not given


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm generate-images", description=main.__doc__)
    parser.add_argument("--workdir", required=True, metavar="RUN[@best|@STEP]", help="the run's folder")
    parser.add_argument("--samples", type=positive, default=64, help="new images; a square number")
    parser.add_argument("--completed", type=positive, default=8, help="test images whose lower half is generated again")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the most likely value")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--out", required=True, type=local_path, help="folder to write")
    add_plugins_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Draws images with a run trained on images: samples, and test images with their lower halves generated again.

    The folder gets samples.png, a square grid, and completions.png: in each row the given half, two completions and the
    original.
    """
    arguments = flags().parse_args(argv)
    use_plugins(arguments)
    # Requirements: a square grid, matplotlib, a model of images.
    columns = math.isqrt(arguments.samples)
    if columns**2 != arguments.samples:
        raise InputError(f"--samples={arguments.samples} must be a square number, such as {columns**2}")
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_package("matplotlib", "plot")
    import numpy as np

    from flash_lm.config.registry import CORPORA
    from flash_lm.data.images import Images
    from flash_lm.data.splits import load_splits
    from flash_lm.inference.images import ImageGenerator
    from flash_lm.inference.model import load_model
    from flash_lm.report.image_grid import grid, write_png

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
    run(main, flags)
