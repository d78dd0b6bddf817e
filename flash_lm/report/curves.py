"""Plots validation perplexity, or accuracy, against steps, training time and FLOPs of training."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import NamedTuple

from flash_lm.report.figure import SCREEN, Output, new_figure, style
from flash_lm.runs.jsonl import Line

# key of a validation line -> its label
_AXES = {
    "step": "training steps",
    "train_seconds": "training time, s (without compilation, evaluation and saving)",
    "rated_seconds": "training time, s (steps timed side by side)",
    "flops": "FLOPs of training",
}
_TIMES = ("train_seconds", "rated_seconds")
# key of a validation line -> its label, its scale, its format on the axis and beside a run's name
_QUALITIES = {
    "perplexity": ("validation perplexity per token", "log", "{x:g}", "{:.1f}"),
    "accuracy": ("validation accuracy of the predicted tokens", "linear", "{x:.0%}", "{:.1%}"),
}
_LEGEND_COLUMNS = {"screen": 3, "single": 1, "double": 3}
_ENTRY = 0.22  # inches of a line of the legend


class Curve(NamedTuple):
    """The points of one or several runs that differ only in their seed.

    Attributes:
        lines: the validation lines of each run.
        results: the final result of each run.
    """

    lines: Sequence[Sequence[Line]]
    results: Sequence[Line]

    def has(self, key: str) -> bool:
        """Whether all its points have a value."""
        return all(key in line for run in self.lines for line in run)

    def points(self, x: str, y: str) -> list[tuple[float, float, float, float]]:
        """Where each run has them: x (the mean over runs), the mean of y, its lowest and its highest value."""
        rows = list(zip(*self.lines, strict=False))
        of = lambda row, key: [line[key] for line in row]
        return [(fmean(of(row, x)), _mean(of(row, y), y), min(of(row, y)), max(of(row, y))) for row in rows]


def plot_curves(
    curves: Mapping[str, Curve],
    path: pathlib.Path,
    title: str,
    *,
    axes: Sequence[str] = ("step", "train_seconds"),
    quality: str = "perplexity",
    output: Output = SCREEN,
) -> None:
    """Draws quality against several measures of training, a panel for each.

    Bands go from the lowest to the highest seed. A curve's points may use only the first tokens of a split; the axis
    label says so. The number beside a name is the result on a full split, as in a table, not the curve's last point.

    Args:
        curves: by name.
        path: the file to write.
        title: the title, which says what was trained; a paper's figure has none.
        axes: keys of the x axes; one that a curve lacks is left out.
        quality: perplexity or accuracy.
        output: formats and width.
    """
    keys = [key for key in axes if all(curve.has(key) for curve in curves.values())]
    label, scale, tick, end = _QUALITIES[quality]
    columns = min(_LEGEND_COLUMNS[output.width], len(curves))
    legend = _ENTRY * math.ceil(len(curves) / columns)
    rows, across = output.arrange(len(keys))
    with new_figure(path, rows, across, (4.8, 4 + legend), output, sharey=True) as (figure, grid):
        for panel, key in zip(grid.flat, keys, strict=True):
            for i, (name, curve) in enumerate(curves.items()):
                x, y, low, high = zip(*curve.points(key, quality), strict=True)
                final = _final(curve, quality)
                look = style(i) | ({} if output.on_paper else {"markersize": 4})
                panel.plot(x, y, label=f"{name}: {end.format(final)}", **look)
                if len(curve.lines) > 1:
                    panel.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
            panel.margins(x=0.03)
            panel.set_xlim(left=0)
            panel.set_xlabel(_x_label(key, curves))
            panel.set_yscale(scale)
            panel.yaxis.set_major_formatter(tick)
            panel.yaxis.set_minor_formatter(tick)
        for panel in grid[:, 0]:
            panel.set_ylabel(label + _scored_on(curves))
        # One legend with the final results, the best first, below the panels: there is room for any number of names.
        splits = " and ".join(dict.fromkeys(result["split"] for curve in curves.values() for result in curve.results))
        handles, texts = grid.flat[0].get_legend_handles_labels()
        named = zip(curves.values(), handles, texts, strict=True)
        ranked = sorted(named, key=lambda x: _final(x[0], quality))
        _, *named = zip(*(ranked if quality == "perplexity" else ranked[::-1]), strict=True)
        heading = f"name: {quality} on the full {splits} split" + _seeds(curves)
        figure.legend(*named, loc="outside lower center", frameon=False, ncols=columns, title=heading)
        if not output.on_paper:
            figure.suptitle(title)


def _final(curve: Curve, quality: str) -> float:
    """The result of a curve: the mean over its runs."""
    return _mean([result[quality] for result in curve.results], quality)


def _mean(values: Sequence[float], quality: str) -> float:
    """The mean over seeds: of perplexities the geometric one, that of the mean loss."""
    return geometric_mean(values) if quality == "perplexity" else fmean(values)


def _x_label(key: str, curves: Mapping[str, Curve]) -> str:
    """The axis label, for a time with the hardware."""
    devices = dict.fromkeys(
        result.get("trained_device") or result.get("device", "")
        for curve in curves.values()
        for result in curve.results
    )
    where = " and ".join(filter(None, devices))
    return f"{_AXES[key]}\n{where}" if key in _TIMES and where else _AXES[key]


def _seeds(curves: Mapping[str, Curve]) -> str:
    seeds = max(len(curve.lines) for curve in curves.values())
    return f"; mean of {seeds} seeds, bands from the lowest to the highest" if seeds > 1 else ""


def _scored_on(curves: Mapping[str, Curve]) -> str:
    """The axis label's part on the number of tokens per point, if the lines have it."""
    counts = sorted(
        {line["tokens"] for curve in curves.values() for run in curve.lines for line in run if "tokens" in line}
    )
    if not counts:
        return ""
    return f",\n{' to '.join(f'{x:,.0f}' for x in dict.fromkeys((counts[0], counts[-1])))} tokens per point"
