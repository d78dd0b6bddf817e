"""Plots panels of curves with their names at their ends, readable without colour."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable

from flash_lm.report.figure import new_figure, round_ticks, style
from flash_lm.runs.jsonl import Line

_NAME_HEIGHT = 0.045  # height of a curve's name, as a share of the axes
_TICKS_APART = 0.06  # of the x axis; where values are nearer to each other, it has round ones
_PLAIN = 10**8  # larger numbers are written with an exponent
_LONGEST_NAME = 34  # characters that are written of a curve's name: a longer one would leave no room for the axes


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel: one plot of a row of plots.

    Attributes:
        lines: the results that it shows.
        x: key of the x values.
        x_label: label of the x axis, with the unit.
        y: key of the y values; lines without it are left out.
        y_label: label of the y axis, with the unit.
        unit: factor for the y values.
        title: the panel's title.
        band: keys of the lowest and the highest y values, between which a curve has a band, or a
            single point a line, where it has them.
    """

    lines: list[Line]
    x: str
    x_label: str
    y: str
    y_label: str
    unit: float = 1.0
    title: str = ""
    band: tuple[str, str] | None = None


def plot_panels(
    rows: list[list[Panel]],
    path: pathlib.Path,
    *,
    curve: str = "family",
    names: Iterable[str] = (),
    title: str = "",
) -> None:
    """Draws rows of panels on logarithmic axes, a curve for each value of one key, the same style in all panels.

    Args:
        rows: rows with the same number of panels each.
        path: the PNG to write; its folder is created if necessary.
        curve: key of the lines that names the curves.
        names: of all curves of several figures, so that a curve has the same style in all of them.
        title: title of the figure.
    """
    names = list(dict.fromkeys([*names, *(line[curve] for row in rows for panel in row for line in panel.lines)]))
    with new_figure(path, len(rows), len(rows[0]), (7, 6)) as (figure, grid):
        for panel, axes in zip((panel for row in rows for panel in row), grid.flat, strict=True):
            # A curve for each name, with its band; the names are written at the ends.
            ends = []
            for i, name in enumerate(names):
                points = sorted(_points((line for line in panel.lines if line[curve] == name), panel))
                if points:
                    x, y = zip(*points, strict=True)
                    axes.plot(x, y, markersize=4, **style(i))
                    band = _band((line for line in panel.lines if line[curve] == name), panel)
                    if len(band) == 1:
                        axes.vlines(*band[0], color=style(i)["color"], alpha=0.4)
                    elif band:
                        axes.fill_between(*zip(*band, strict=True), color=style(i)["color"], alpha=0.15, linewidth=0)
                    ends.append((x[-1], y[-1], name, style(i)["color"]))
            # Ticks are the measured values, unless they are too near to each other.
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            measured = sorted({line[panel.x] for line in panel.lines})
            if measured:
                axes.set_xticks(measured if _are_apart(measured, axes.get_xlim()) else round_ticks(measured))
            axes.xaxis.set_major_formatter("{x:,.4g}" if measured and measured[-1] > _PLAIN else "{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:,g}")
            _name_ticks(axes)
            axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
            _name_ends(axes, ends)
        figure.suptitle(title)


def _are_apart(values: list[float], ends: tuple[float, float]) -> bool:
    """Whether the labels of sorted values have room on a logarithmic axis with these ends."""
    least = (ends[1] / ends[0]) ** _TICKS_APART
    return all(after > least * before for before, after in itertools.pairwise(values))


def _name_ticks(axes) -> None:
    """Labels ticks of the y axis.

    They are even steps within half a decade, all of 1 to 9 within a decade, 1, 2 and 5 within three, else the decades.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator  # noqa: PLC0415 (an extra, and slow to import)

    bottom, top = axes.get_ylim()
    if top < 3 * bottom:
        axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
    elif 10 * bottom <= top < 1000 * bottom:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter("{x:,g}" if top < 10 * bottom else "")


def _points(lines: Iterable[Line], panel: Panel) -> list[tuple[float, float]]:
    return [(line[panel.x], line[panel.y] * panel.unit) for line in lines if line.get(panel.y)]


def _band(lines: Iterable[Line], panel: Panel) -> list[tuple[float, float, float]]:
    """The band of a curve: x, lowest and highest."""
    if panel.band is None:
        return []
    low, high = panel.band
    return sorted((x[panel.x], x[low] * panel.unit, x[high] * panel.unit) for x in lines if low in x and panel.x in x)


def _name_ends(axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Writes each curve's name at the right edge, as near to its end as the other names allow."""
    bottom, top = axes.get_ylim()
    height = lambda y: math.log(y / bottom) / math.log(top / bottom)
    ends = sorted(ends, key=lambda end: end[1])
    # Push overlapping names apart.
    heights = [height(y) for _, y, _, _ in ends]
    for i in range(1, len(ends)):  # upwards, and back down where that has left the axes
        heights[i] = max(heights[i], heights[i - 1] + _NAME_HEIGHT)
    limit = 1.0
    for i in reversed(range(len(ends))):
        heights[i] = min(heights[i], limit)
        limit = heights[i] - _NAME_HEIGHT
    for at, (x, y, name, color) in zip(heights, ends, strict=True):
        axes.annotate(
            name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…",
            xy=(x, y),
            xytext=(1.03, at),
            textcoords="axes fraction",
            color=color,
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.4, "linewidth": 0.6},
        )
