"""What all plots share: a frame, and styles of curves that can be told apart without colour."""

import contextlib
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Any

_LINES = ("-", "--", "-.", ":")
_MARKERS = "osv^D"


def can_draw() -> bool:
    """Whether there is matplotlib, which some GPU machines lack; tells if not."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print("no plot: matplotlib is not installed")
    return found


@contextlib.contextmanager
def drawing(path: pathlib.Path, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """A figure with an array of rows × columns of axes, written when it is done.

    Args:
        path: of the PNG; its folder is made if need be.
        rows: of axes.
        columns: of axes.
        size: of one of them, inches.
        options: of matplotlib's `subplots`.
    """
    # Matplotlib is an extra, and slow to import.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    whole = (columns * size[0], rows * size[1])
    figure, grid = plt.subplots(rows, columns, squeeze=False, figsize=whole, layout="constrained", **options)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    yield figure, grid
    for axes in grid.flat:
        axes.grid(visible=True, which="both", alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def style(i: int) -> dict[str, Any]:
    """Of the i-th curve."""
    return {"linestyle": _LINES[i % len(_LINES)], "marker": _MARKERS[i % len(_MARKERS)], "color": f"C{i % 10}"}
