"""Formats result lines as Markdown tables."""

from collections.abc import Mapping, Sequence

from flash_lm.runs.jsonl import Line

# heading -> (key of a line, its format); text is left-aligned, numbers are right-aligned
Columns = Mapping[str, tuple[str, str]]
RUNS: Columns = {
    "run": ("run", "{}"),
    "family": ("family", "{}"),
    "parameters": ("parameters", "{:,}"),
    "steps": ("step", "{:,}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "accuracy": ("accuracy", "{:.1%}"),
    "bits per byte": ("bits_per_byte", "{:.3f}"),
    "ms per step": ("train_step_ms", "{:.0f}"),
    "tokens/s": ("train_tokens_per_second", "{:,.0f}"),
    "training s": ("train_seconds", "{:.0f}"),
}
# Columns for models that predict a label per sequence.
LABELLED: Columns = {
    **{heading: RUNS[heading] for heading in ("run", "family", "parameters", "steps", "accuracy")},
    "95 % from": ("accuracy_low", "{:.1%}"),
    "to": ("accuracy_high", "{:.1%}"),
    "macro F1": ("macro_f1", "{:.3f}"),
    "Matthews": ("matthews", "{:.3f}"),
    "most frequent label": ("majority", "{:.1%}"),
    "cut": ("cut", "{:.0%}"),
    **{heading: RUNS[heading] for heading in ("ms per step", "tokens/s", "training s")},
}


def pivot(lines: list[Line], row: str, column: str, value: str, form: str, factor: float = 1) -> str:
    """A pivot table in Markdown: a row per value of a key, a column per value of another, in the order of the lines.

    Args:
        lines: lines with all three keys.
        row: key of the rows.
        column: key of the columns; its values are numbers.
        value: key of the cells.
        form: format of the cells.
        factor: factor for the cells.
    """
    rows: dict[str, Line] = {}
    for line in lines:
        rows.setdefault(line[row], {row: line[row]})[str(line[column])] = line[value] * factor
    columns = {row: (row, "{}")} | {f"{x:,}": (str(x), form) for x in dict.fromkeys(line[column] for line in lines)}
    return markdown_table(list(rows.values()), columns)


def markdown_table(lines: Sequence[Line], columns: Columns = RUNS) -> str:
    """A Markdown table with one row per line; columns are aligned, so that it is readable in a terminal too."""
    cells = [[form.format(line[key]) if key in line else "" for key, form in columns.values()] for line in lines]
    rows = [list(columns), *cells]
    # Text is aligned on the left, numbers on the right.
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    text = [form == "{}" for _, form in columns.values()]
    rule = [":" + "-" * (w - 1) if left else "-" * (w - 1) + ":" for w, left in zip(widths, text, strict=True)]

    def line(row: list[str]) -> str:
        padded = [x.ljust(w) if left else x.rjust(w) for x, w, left in zip(row, widths, text, strict=True)]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in cells)])
