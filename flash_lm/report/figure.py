"""Shared parts of all plots: a frame for the screen or a paper, and styles that differ without colour, too."""

import contextlib
import dataclasses
import importlib.util
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

# Colours that people with any kind of colour blindness tell apart (Okabe and Ito 2008, "Color Universal Design",
# https://jfly.uni-koeln.de/color/), without yellow, which is too pale on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00")
_LINES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
_MARKERS = "osv^DPX<>*"
_NEAR = 2.0  # greatest over smallest value, below which even steps of an axis are read more easily than 1, 2, 5
_FEW = 5  # about as many steps
FORMATS = ("png", "pdf", "svg")
# Inches of a paper's column and page (the templates of ICML); None: as large as a plot needs on a screen.
WIDTHS = {"screen": None, "single": 3.25, "double": 6.75}
_PAPER: dict[Any, Any] = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "legend.fontsize": 6,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "lines.linewidth": 1,
    "lines.markersize": 2.5,
    "axes.linewidth": 0.6,
}
# Letters in a PDF or SVG stay letters, so that they can be searched and edited.
_LETTERS: dict[Any, Any] = {"pdf.fonttype": 42, "svg.fonttype": "none"}


@dataclasses.dataclass(frozen=True)
class Output:
    """How figures are written.

    Attributes:
        formats: some of `FORMATS`; a file for each.
        width: a key of `WIDTHS`.
    """

    formats: tuple[str, ...] = ("png",)
    width: str = "screen"

    @property
    def on_paper(self) -> bool:
        """Whether the figure is for a paper, whose caption is its title."""
        return self.width != "screen"

    def arrange(self, panels: int) -> tuple[int, int]:
        """Rows and columns of some panels: one above the other in a single column, else side by side."""
        return (panels, 1) if self.width == "single" else (1, panels)


SCREEN = Output()


def can_draw() -> bool:
    """Whether matplotlib is installed (some GPU machines lack it); prints a line if not."""
    is_installed = importlib.util.find_spec("matplotlib") is not None
    if not is_installed:
        print("no plot: matplotlib is not installed")
    return is_installed


@contextlib.contextmanager
def new_figure(
    path: pathlib.Path,
    rows: int,
    columns: int,
    size: tuple[float, float],
    output: Output = SCREEN,
    **options: Any,
) -> Iterator[Any]:
    """Makes a figure with rows × columns of axes, and writes it when the block ends; nothing of it is cut.

    Args:
        path: the file to write, with any ending; its folder is created if necessary.
        rows: number of rows of axes.
        columns: number of columns of axes.
        size: width and height of one of the axes, in inches; a paper's width keeps their ratio.
        output: formats and width.
        options: options of matplotlib's `subplots`.
    """
    # Matplotlib is an extra, and slow to import.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    width = WIDTHS[output.width] or columns * size[0]
    figsize = (width, rows * size[1] * width / (columns * size[0]))
    with matplotlib.rc_context(_LETTERS | (_PAPER if output.on_paper else {})):
        figure, grid = plt.subplots(rows, columns, squeeze=False, figsize=figsize, layout="constrained", **options)
        for axes in grid.flat:
            axes.spines[["top", "right"]].set_visible(False)
        yield figure, grid
        for axes in grid.flat:
            axes.grid(visible=True, which="both", alpha=0.25)
        path.parent.mkdir(parents=True, exist_ok=True)
        for kind in output.formats:
            # A date would make the same figure another file.
            metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
            figure.savefig(
                path.with_suffix(f".{kind}"), dpi=150, bbox_inches="tight", pad_inches=0.05, metadata=metadata
            )
        plt.close(figure)


def style(i: int) -> dict[str, Any]:
    """The style of the i-th curve: 140 that differ, neighbours in colour, line and marker."""
    return {
        "linestyle": _LINES[i % len(_LINES)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "color": _COLOURS[i % len(_COLOURS)],
    }


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
