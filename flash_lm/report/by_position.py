"""Perplexity by position in the document, from the lines of `evaluate --carry`: a table and a plot."""

import pathlib
from collections.abc import Sequence

from flash_lm.report.figure import new_figure, style
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line


def position_table(lines: Sequence[Line]) -> str:
    """A table with a row per run and a column per span of positions: perplexity with the rows before, and without."""
    # Columns in the order in which the lines name spans.
    rows, columns = [], dict[str, tuple[str, str]]({"run": ("run", "{}")})
    for line in lines:
        row: Line = {"run": line["run"]}
        for span in line["by_position"]:
            name = f"{span['from']:,}–{span['to'] - 1:,}"
            columns[name] = (name, "{} ")  # text, but on the right like a number
            row[name] = f"{span['perplexity']:.1f} ({span['perplexity_alone']:.1f})"
        rows.append(row)
    shown: Columns = columns
    return markdown_table(rows, shown)


def plot_by_position(lines: Sequence[Line], path: pathlib.Path) -> None:
    """Plots axes for each family: a curve per run with the rows before, and a pale one for its rows by themselves."""
    families = list(dict.fromkeys(line["family"] for line in lines))
    columns = min(len(families), 2)
    with new_figure(path, -(-len(families) // columns), columns, (4.6, 3.4), sharex=True, sharey=True) as (_, grid):
        for axes in grid.flat[len(families) :]:
            axes.set_axis_off()
        for axes, family in zip(grid.flat, families, strict=False):
            for i, line in enumerate(line for line in lines if line["family"] == family):
                # A span is drawn at its middle.
                spans = line["by_position"]
                middles = [(span["from"] + span["to"]) / 2 for span in spans]
                look = style(i) | {"markersize": 4}
                axes.plot(middles, [span["perplexity"] for span in spans], label=line["run"], **look)
                alone = look | {"marker": None, "alpha": 0.4, "label": f"{line['run']}, independent sequences"}
                axes.plot(middles, [span["perplexity_alone"] for span in spans], **alone)
            axes.set_xscale("log", base=2)
            axes.set_title(family)
            axes.set_xlabel("position in the document, tokens")
            axes.legend(fontsize=7)
            axes.set_ylabel("perplexity")
            axes.label_outer()
        grid[0, 0].set_yscale("log")
        for axis in (grid[0, 0].yaxis.set_major_formatter, grid[0, 0].yaxis.set_minor_formatter):
            axis("{x:g}")
