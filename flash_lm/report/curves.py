"""Plots validation perplexity, or accuracy, against steps and against training seconds."""

import pathlib

from flash_lm.report.figure import new_figure, style
from flash_lm.runs.jsonl import Line

# key of a validation line -> its label
_AXES = {
    "step": "steps",
    "train_seconds": "training seconds (without compilation, evaluation and saving)",
    "rated_seconds": "training seconds at step times that were measured side by side",
}
# key of a validation line -> its label, its scale, its format on the axis and beside a run's name
_QUALITIES = {
    "perplexity": ("validation perplexity per token", "log", "{x:g}", "{:.1f}"),
    "accuracy": ("validation accuracy of the tokens to be predicted", "linear", "{x:.0%}", "{:.1%}"),
}


def plot_curves(
    curves: dict[str, list[Line]],
    results: dict[str, Line],
    path: pathlib.Path,
    title: str,
    time: str = "train_seconds",
    quality: str = "perplexity",
) -> None:
    """Draws one curve per run in two panels: quality for the same data, and quality for the same time.

    A curve's points may use only the first tokens of a split; the axis label says so. The number beside a run's name
    is its result on a full split, as in a table, not the curve's last point.

    Args:
        curves: name of the run -> its validation lines.
        results: name of the run -> its final result.
        path: the PNG to write.
        title: the title, which says what was trained.
        time: key of the second panel's time axis.
        quality: perplexity or accuracy.
    """
    keys, (label, scale, tick, end) = ("step", time), _QUALITIES[quality]
    with new_figure(path, 1, len(keys), (5.5, 5), sharey=True) as (figure, (panels,)):
        for axes, key in zip(panels, keys, strict=True):
            for i, (name, lines) in enumerate(curves.items()):
                x, y = ([line[field] for line in lines] for field in (key, quality))
                axes.plot(x, y, markersize=4, label=f"{name}: {end.format(results[name][quality])}", **style(i))
            axes.margins(x=0.03)
            axes.set_xlim(left=0)
            axes.set_xlabel(_AXES[key])
        # The panels share the y axis, and one legend with the final results.
        first = panels[0]
        first.set_yscale(scale)
        first.yaxis.set_major_formatter(tick)
        first.yaxis.set_minor_formatter(tick)
        first.set_ylabel(label + _scored_on(curves))
        named = first.get_legend_handles_labels()
        splits = " and ".join(dict.fromkeys(results[name]["split"] for name in curves))
        heading = f"final result on the\nfull {splits} split"
        figure.legend(*named, loc="outside right center", frameon=False, title=heading)
        figure.suptitle(title)


def _scored_on(curves: dict[str, list[Line]]) -> str:
    """The axis label's part on the number of tokens per point, if the lines have it."""
    counts = sorted({line["tokens"] for lines in curves.values() for line in lines if "tokens" in line})
    if not counts:
        return ""
    return f", {' to '.join(f'{x:,.0f}' for x in dict.fromkeys((counts[0], counts[-1])))} tokens per point"
