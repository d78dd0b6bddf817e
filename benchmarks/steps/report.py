"""Step times as tables and as a plot."""

import pathlib

from flash_lm.report.markdown import markdown_table, pivot
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.runs.jsonl import Line
from flash_lm.timing.machine import machines

BASELINE = "transformer_plus_plus"
# title -> (key of a line, factor, format)
_TABLES = {
    "Milliseconds per step": ("median_ms", 1, "{:,.0f}"),
    f"Times as fast as {BASELINE}": ("speedup", 1, "{:.2f}"),
    "Temporary memory, MB": ("temp_bytes", 1e-6, "{:,.0f}"),
    "Model FLOP/s as a share of the peak": ("peak_fraction", 100, "{:.0f} %"),
}


def step_time_tables(lines: list[Line]) -> str:
    """Returns Markdown tables with one row per family and one column per length."""
    lines = sorted(lines, key=lambda line: line["length"])
    parts = [_title(lines)]
    for title, (key, factor, form) in _TABLES.items():
        with_key = [line for line in lines if isinstance(line.get(key), int | float)]
        if with_key:
            parts += [
                f"{title}, by length; {machines(with_key)}",
                pivot(with_key, "family", "length", key, form, factor),
            ]
    for key, heading in (("does_not_fit", "does not fit"), ("failed", "failed"), ("skipped", "no time left")):
        if misses := [line for line in lines if key in line]:
            columns = {"family": ("family", "{}"), "length": ("length", "{:,}"), heading: (key, "{}")}
            parts.append(markdown_table(misses, columns))
    return "\n\n".join(parts)


def plot_step_times(lines: list[Line], path: pathlib.Path) -> None:
    """Plots milliseconds per step and temporary memory against the sequence length."""
    timed_lines = [line for line in lines if "median_ms" in line]
    time = Panel(timed_lines, "length", "tokens per sequence", "median_ms", "milliseconds per training step")
    memory = Panel(
        timed_lines, "length", "tokens per sequence", "temp_bytes", "megabytes of temporary memory", unit=1e-6
    )
    plot_panels([[time, memory]], path, title=_title(lines))


def _title(lines: list[Line]) -> str:
    first = lines[0]
    return (
        f"Training steps of {first['tokens_per_step']:,} tokens: size {first['size']}, {first['task']}, "
        f"{first['dtype']}, {first['device']}"
    )
