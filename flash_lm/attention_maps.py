"""flash-lm attention-maps runs/demo/flash --out=runs/maps [--text="…" --tokens=256]."""

import argparse
import importlib.util
import pathlib

from flash_lm.cli.figure_flags import add_figure_flags, figure_output
from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.errors import missing_package

_TEXT = pathlib.Path(argparse.__file__)  # a text on every machine, from the default corpus


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm attention-maps", description=main.__doc__)
    parser.add_argument("--workdir", required=True, metavar="RUN[@best|@STEP]", help="the run's folder")
    parser.add_argument("--text", help="default: the beginning of a module of Python's library")
    parser.add_argument("--tokens", type=positive, default=256, help="most tokens of the text")
    parser.add_argument("--out", required=True, type=local_path, help="folder for attention.png")
    add_figure_flags(parser)
    add_plugins_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Draws a trained run's attention weights on a text, by layer and head; rows are queries.

    Mixed chunk attention is drawn as its local and its global term, AFT as exp(w) − 1 and its weights.
    """
    arguments = flags().parse_args(argv)
    output = figure_output(arguments)
    use_plugins(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_package("matplotlib", "plot")
    from flash_lm.inference.api import load
    from flash_lm.report.attention_maps import draw

    model = load(arguments.workdir)
    text = _TEXT.read_text(encoding="utf-8") if arguments.text is None else arguments.text
    maps = model.attention(text, arguments.tokens)
    length = maps[0].weights_BxHxLxL.shape[-1]
    path = arguments.out / "attention.png"
    draw(maps, path, f"{model.name}, step {model.step}: {length} tokens", output)
    print(f"{path}: {len(maps)} maps of {length} tokens")


if __name__ == "__main__":
    run(main, flags)
