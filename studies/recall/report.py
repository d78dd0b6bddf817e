"""Report of the recall study: a table and a picture of recall against state."""

import pathlib
import statistics

from flash_lm.report.figure import new_figure, style
from flash_lm.report.markdown import markdown_table
from flash_lm.runs.jsonl import Line
from flash_lm.sweeps.rates import lines_at_best_rate


def selection_loss(line: Line) -> float:
    """Returns the score that chooses a rate: the negative validation accuracy; a failed run is the worst."""
    return -line.get("validation_accuracy", -1.0)


def summarize(runs: list[Line], times: list[Line]) -> list[Line]:
    """Returns a line per model and width: accuracy over the seeds at its best rate, its state, and its time per token.

    Seeds whose loss did not stay finite are counted, and have no accuracy.
    """
    ms = {(line["model"], line["width"]): line["ms_a_token"] for line in times}
    summaries = []
    # A line per model and width, at its best rate.
    for model, width in dict.fromkeys((line["model"], line["width"]) for line in runs):
        chosen_lines = lines_at_best_rate(runs, {"model": model, "width": width}, selection_loss)
        finite, rate = [line for line in chosen_lines if "failed" not in line], chosen_lines[0]["rate"]
        failed = len(chosen_lines) - len(finite)
        if not finite:
            summaries.append({"model": model, "width": width, "rate": rate, "seeds": 0, "failed": failed})
            continue
        accuracies = [line["accuracy"] for line in finite]
        parts = {part: statistics.median(line["by_part"][part] for line in finite) for part in finite[0]["by_part"]}
        summaries.append(
            {
                "model": model,
                "width": width,
                "rate": rate,
                "seeds": len(finite),
                "failed": failed,
                "accuracy": statistics.median(accuracies),
                "lowest": min(accuracies),
                "highest": max(accuracies),
                "by_part": parts,
                "step": statistics.median(line["step"] for line in finite),
                "state_bytes": finite[0]["state_bytes"],
                "parameters": finite[0]["parameters"],
                **({"ms_a_token": ms[model, width]} if (model, width) in ms else {}),
            }
        )
    return summaries


def recall_table(lines: list[Line]) -> str:
    """Returns a Markdown table, the best model first; `failed` counts seeds whose loss did not stay finite."""
    rows = [line | line.get("by_part", {}) for line in sorted(lines, key=lambda line: -line.get("accuracy", -1))]
    parts = dict.fromkeys(part for line in lines for part in line.get("by_part", {}))
    columns = {
        "model": ("model", "{}"),
        "width": ("width", "{}"),
        "accuracy": ("accuracy", "{:.1%}"),
        "lowest": ("lowest", "{:.1%}"),
        "highest": ("highest", "{:.1%}"),
        **{part: (part, "{:.1%}") for part in parts},
        "seeds": ("seeds", "{}"),
        "failed": ("failed", "{}"),
        "rate": ("rate", "{:g}"),
        "steps": ("step", "{:,.0f}"),
        "state, bytes": ("state_bytes", "{:,}"),
        "ms per token": ("ms_a_token", "{:.2f}"),
        "parameters": ("parameters", "{:,}"),
    }
    return markdown_table(rows, columns)


def plot_recall(lines: list[Line], path: pathlib.Path) -> None:
    """Plots accuracy against bytes of state and against ms per token; one curve per model, over its widths."""
    axes_of = (
        ("state_bytes", "bytes of decode state per sequence"),
        ("ms_a_token", "milliseconds per token, 16 sequences"),
    )
    names = list(dict.fromkeys(line["model"] for line in lines))
    # A panel per axis, a curve per model over its widths.
    with new_figure(path, 1, len(axes_of), (7, 6 + 0.1 * len(names)), sharey=True) as (figure, grid):
        for axes, (key, label) in zip(grid.flat, axes_of, strict=True):
            for i, name in enumerate(names):
                points = sorted(
                    (line for line in lines if line["model"] == name and key in line), key=lambda x: x["width"]
                )
                percent = lambda what, points=points: [100 * line[what] for line in points]
                low, y, high = (percent(what) for what in ("lowest", "accuracy", "highest"))
                spread = [[b - a for a, b in zip(*ends, strict=True)] for ends in ((low, y), (y, high))]
                x = [line[key] for line in points]
                axes.errorbar(x, y, yerr=spread, label=name, markersize=5, capsize=2, **style(i))
            axes.set_xscale("log")
            axes.set(xlabel=label)
        grid.flat[0].set(ylabel="recalled values, % (median, lowest and highest of the seeds)", ylim=(-2, 102))
        legend = grid.flat[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=2, fontsize=7, frameon=False)  # names may be long
