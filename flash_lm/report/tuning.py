"""Reports a search for the best value of a key: a table, and loss against the value for each model."""

import math
import pathlib

from flash_lm.report.figure import SCREEN, Output, can_draw, new_figure, style
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line, write_jsonl

_COLUMNS: Columns = {
    "model": ("model", "{}"),
    "best value": ("value", "{:g}"),
    "validation loss": ("loss", "{:.4f}"),
    "at the next smaller": ("below", "{:.4f}"),
    "at the next greater": ("above", "{:.4f}"),
    "runs": ("runs", "{}"),
    "": ("remark", "{}"),
}
_ACROSS = 4  # panels in a row of the plot


def write_tuning(lines: list[Line], best: list[Line], out: pathlib.Path, output: Output = SCREEN) -> str:
    """Writes table.md, best.jsonl and, with matplotlib, tuning.png into a folder.

    Args:
        lines: from `tune`, at least one.
        best: of each model, from `best_values`.
        out: the folder, which exists.
        output: formats and width of the figure.

    Returns:
        The table below its title.
    """
    write_jsonl(out / "best.jsonl", best)
    text = f"{_title(lines)}\n\n{markdown_table([_row(line, lines) for line in best], _COLUMNS)}"
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        _plot(lines, best, out / "tuning.png", output)
    return text


def _title(lines: list[Line]) -> str:
    last = max(line["tokens"] for line in lines)
    seeds = ", ".join(str(seed) for seed in sorted({line["seed"] for line in lines if "seed" in line}))
    return f"{lines[0]['key']}: the last round has {last:,} tokens per run, seed {seeds}"


def _row(best: Line, lines: list[Line]) -> Line:
    lines_of_model = [line for line in lines if line["model"] == best["model"]]
    # The neighbours of the best value in the last round show how much it matters.
    last = sorted((x for x in lines_of_model if x["round"] == best["round"]), key=lambda line: line["value"])
    index = [line["value"] for line in last].index(best["value"])
    row = {name: best[name] for name in ("model", "value", "loss") if name in best} | {"runs": len(lines_of_model)}
    for name, near in (("below", index - 1), ("above", index + 1)):
        if 0 <= near < len(last) and "loss" in last[near]:
            row[name] = last[near]["loss"]
    remarks = ["the grid grew"] * best["grown"] + ["no best value: the grid ends here"] * (not best["bracketed"])
    failed = sum("failed" in line for line in lines_of_model)
    return row | {"remark": "; ".join([*remarks, *([f"{failed} not finite"] * bool(failed))])}


def _plot(lines: list[Line], best: list[Line], path: pathlib.Path, output: Output) -> None:
    """Plots a panel for each model, a curve for each round; a ring is around the best value."""
    columns = min(len(best), _ACROSS)
    with new_figure(path, math.ceil(len(best) / columns), columns, (3.6, 3.2), output) as (figure, grid):
        panels = list(grid.flat)
        for axes in panels[len(best) :]:
            axes.remove()
        # A panel per model: a curve for each round, and a circle around the chosen value.
        for axes, chosen in zip(panels, best, strict=False):
            lines_of_model = [line for line in lines if line["model"] == chosen["model"] and "loss" in line]
            for i, number in enumerate(sorted({line["round"] for line in lines_of_model})):
                points = sorted((x["value"], x["loss"]) for x in lines_of_model if x["round"] == number)
                tokens = next(line["tokens"] for line in lines_of_model if line["round"] == number)
                axes.plot(*zip(*points, strict=True), label=f"{tokens:,} tokens", markersize=4, **style(i))
            if "loss" in chosen:
                axes.plot(chosen["value"], chosen["loss"], "o", markersize=12, fillstyle="none", color="black")
            axes.set_xscale("log", base=10)
            axes.set_title(chosen["model"], fontsize="medium")
            axes.set_xlabel(chosen["key"])
            axes.set_ylabel("validation loss, nats per token")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
