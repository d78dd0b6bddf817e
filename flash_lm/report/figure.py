"""Shared parts of all plots: a frame, and styles of curves that differ even without colour."""

import contextlib
import importlib.util
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

_LINES = ("-", "--", "-.", ":")
_MARKERS = "osv^D"
_NEAR = 2.0  # greatest over smallest value, below which even steps of an axis are read more easily than 1, 2, 5
_FEW = 5  # about as many steps


def can_draw() -> bool:
    """Whether matplotlib is installed (some GPU machines lack it); prints a line if not."""
    is_installed = importlib.util.find_spec("matplotlib") is not None
    if not is_installed:
        print("no plot: matplotlib is not installed")
    return is_installed


@contextlib.contextmanager
def new_figure(path: pathlib.Path, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Makes a figure with rows × columns of axes, and writes it when the block ends.

    Args:
        path: the PNG to write; its folder is created if necessary.
        rows: number of rows of axes.
        columns: number of columns of axes.
        size: size of one of the axes, in inches.
        options: options of matplotlib's `subplots`.
    """
    # Matplotlib is an extra, and slow to import.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figsize = (columns * size[0], rows * size[1])
    figure, grid = plt.subplots(rows, columns, squeeze=False, figsize=figsize, layout="constrained", **options)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    yield figure, grid
    for axes in grid.flat:
        axes.grid(visible=True, which="both", alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def style(i: int) -> dict[str, Any]:
    """The style of the i-th curve."""
    return {"linestyle": _LINES[i % len(_LINES)], "marker": _MARKERS[i % len(_MARKERS)], "color": f"C{i % 10}"}


def round_ticks(values: Sequence[float]) -> list[float]:
    """Round numbers that cover positive values, for a logarithmic axis; in even steps where the values are alike."""
    # Values within a factor of two get even steps.
    low, high = min(values), max(values)
    if low < high < _NEAR * low:
        power = 10.0 ** math.floor(math.log10((high - low) / _FEW))
        step = next(x * power for x in (1, 2, 5, 10) if x * power * _FEW >= high - low)
        return [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
    # Others get 1, 1.5, 2, 3, 5, 7 of each power of ten.
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = [factor * 10.0**power for power in powers for factor in (1, 1.5, 2, 3, 5, 7)]
    first = max(x for x in steps if x <= low)
    return [x for x in steps if first <= x <= 1.2 * high]
