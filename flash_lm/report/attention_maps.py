"""Draws attention maps: a picture per layer and head."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from flash_lm.report.figure import SCREEN, Output, new_figure

_INCHES = (1.9, 2.0)
_FULL_COLOUR = 0.995  # quantile of the nonzero weights with full colour: a single large one would leave all others pale


def _from_one(one: Any) -> Any:
    """Position-bias weights are all close to one: shows their distance from one."""
    if one.term != "exp(w)":
        return one
    seen = one.weights_BxHxLxL > 0
    return dataclasses.replace(one, term="exp(w) − 1", weights_BxHxLxL=seen * (one.weights_BxHxLxL - 1))


def lines_of(maps: Sequence[Any]) -> list[list[tuple[Any, int]]]:
    """Arranges maps in rows: one row per map, or one row per layer for maps with a single head."""
    heads = [[(one, head) for head in range(one.weights_BxHxLxL.shape[1])] for one in maps]
    if max(len(line) for line in heads) > 1:
        return heads
    layers = sorted({one.layer for one in maps})
    return [[(one, 0) for one in maps if one.layer == layer] for layer in layers]


def draw(maps: Sequence[Any], path: pathlib.Path, title: str, output: Output = SCREEN) -> None:
    """Draws one picture per head; colour follows the square root of a weight, up to a high quantile of its map."""
    lines = lines_of([_from_one(one) for one in maps])
    with new_figure(path, len(lines), max(len(line) for line in lines), _INCHES, output) as (figure, grid):
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
