"""Draws a trained run's attention weights on a text, by layer and head.

    python scripts/attention_maps.py --workdir=runs/demo/flash --out=runs/demo/attention.png --tokens=256

Mixed chunk attention is drawn as its local and its global term, AFT as exp(w) − 1 and its weights. Rows are queries.
"""

import argparse
import dataclasses
import importlib.util
import pathlib

import numpy as np

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.errors import missing_package
from flash_lm.inference.api import load
from flash_lm.models.attention_weights import AttentionMap
from flash_lm.report.figure import new_figure

_TEXT = pathlib.Path(argparse.__file__)  # a text on every machine, from the default corpus
_INCHES = (1.9, 2.0)
_FULL_COLOUR = 0.995  # quantile of the nonzero weights with full colour: a single large one would leave all others pale


def _from_one(one: AttentionMap) -> AttentionMap:
    """Position-bias weights are all close to one: shows their distance from one."""
    if one.term != "exp(w)":
        return one
    seen = one.weights_BxHxLxL > 0
    return dataclasses.replace(one, term="exp(w) − 1", weights_BxHxLxL=seen * (one.weights_BxHxLxL - 1))


def lines_of(maps: list[AttentionMap]) -> list[list[tuple[AttentionMap, int]]]:
    """Arranges maps in rows: one row per map, or one row per layer for maps with a single head."""
    heads = [[(one, head) for head in range(one.weights_BxHxLxL.shape[1])] for one in maps]
    if max(len(line) for line in heads) > 1:
        return heads
    layers = sorted({one.layer for one in maps})
    return [[(one, 0) for one in maps if one.layer == layer] for layer in layers]


def draw(maps: list[AttentionMap], path: pathlib.Path, title: str) -> None:
    """Draws one picture per head; colour follows the square root of a weight, up to a high quantile of its map."""
    lines = lines_of([_from_one(one) for one in maps])
    with new_figure(path, len(lines), max(len(line) for line in lines), _INCHES) as (figure, grid):
        figure.suptitle(title)
        for axes, line in zip(grid, lines, strict=True):
            for cell in axes[len(line) :]:
                cell.set_axis_off()
            for cell, (one, head) in zip(axes, line, strict=False):
                cell.set(xticks=[], yticks=[])
                sizes = abs(one.weights_BxHxLxL)
                full = np.quantile(sizes[sizes > 0], _FULL_COLOUR) if sizes.any() else 1
                weights_LxL = one.weights_BxHxLxL[0, head] / full
                rooted = np.sign(weights_LxL) * np.sqrt(abs(weights_LxL))
                cell.imshow(rooted, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
                if head == 0:
                    name = f"layer {one.layer + 1}.{one.sublayer + 1}, {one.term}\nlargest {sizes.max():.2g}"
                    cell.set_title(name, fontsize=7, loc="left")


def main(argv: list[str]) -> None:
    """Draws the attention maps of a checkpoint."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workdir", required=True, metavar="RUN[@best|@STEP]", help="the run's folder")
    parser.add_argument("--text", help="default: the beginning of a module of Python's library")
    parser.add_argument("--tokens", type=positive, default=256, help="most tokens of the text")
    parser.add_argument("--out", required=True, type=local_path, help="the PNG file to write")
    add_plugins_flag(parser)
    arguments = parser.parse_args(argv)
    use_plugins(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_package("matplotlib", "plot")
    model = load(arguments.workdir)
    text = _TEXT.read_text(encoding="utf-8") if arguments.text is None else arguments.text
    maps = model.attention(text, arguments.tokens)
    length = maps[0].weights_BxHxLxL.shape[-1]
    draw(maps, arguments.out, f"{model.name}, step {model.step}: {length} tokens")
    print(f"{arguments.out}: {len(maps)} maps of {length} tokens")


if __name__ == "__main__":
    run(main)
