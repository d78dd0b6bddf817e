"""Step times as tables and as a plot."""

import pathlib

from flash_lm.report.markdown import markdown_table, pivot
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.runs.jsonl import Line

BASELINE = "transformer_plus_plus"
# title -> (key of a line, factor, format)
_TABLES = {
    "Milliseconds a step": ("median_ms", 1, "{:,.0f}"),
    f"Times as fast as {BASELINE}": ("speedup", 1, "{:.2f}"),
    "Temporary memory, MB": ("temp_bytes", 1e-6, "{:,.0f}"),
    "Model FLOP/s as a part of the peak": ("peak_fraction", 100, "{:.0f} %"),
}


def step_time_tables(lines: list[Line]) -> str:
    """Markdown: in each table one row per family and one column per length."""
    lines = sorted(lines, key=lambda line: line["length"])
    found = [_title(lines)]
    for title, (key, factor, form) in _TABLES.items():
        there = [line for line in lines if isinstance(line.get(key), int | float)]
        if there:
            found += [f"{title}, by length", pivot(there, "family", "length", key, form, factor)]
    for key, heading in (("does_not_fit", "does not fit"), ("failed", "failed")):
        if misses := [line for line in lines if key in line]:
            columns = {"family": ("family", "{}"), "length": ("length", "{:,}"), heading: (key, "{}")}
            found.append(markdown_table(misses, columns))
    return "\n\n".join(found)


def plot_step_times(lines: list[Line], path: pathlib.Path) -> None:
    """Two panels against the row length: milliseconds per step, and temporary memory."""
    timed = [line for line in lines if "median_ms" in line]
    time = Panel(timed, "length", "tokens a row", "median_ms", "milliseconds a training step")
    memory = Panel(timed, "length", "tokens a row", "temp_bytes", "megabytes of temporary memory", unit=1e-6)
    plot_panels([[time, memory]], path, title=_title(lines))


def _title(lines: list[Line]) -> str:
    first = lines[0]
    return (
        f"Training steps of {first['tokens_per_step']:,} tokens: size {first['size']}, {first['task']}, "
        f"{first['dtype']}, {first['device']}"
    )
