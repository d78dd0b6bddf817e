"""Results as a Markdown table."""

from flash_lm.analysis.results import Line

# heading -> (key of a result, how it is written)
COLUMNS = {
    "run": ("run", "{}"),
    "family": ("family", "{}"),
    "parameters": ("parameters", "{:,}"),
    "steps": ("step", "{:,}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "bits a byte": ("bits_per_byte", "{:.3f}"),
    "ms a step": ("train_step_ms", "{:.0f}"),
    "tokens/s": ("train_tokens_per_second", "{:,.0f}"),
    "training s": ("train_seconds", "{:.0f}"),
}


def markdown_table(results: list[Line]) -> str:
    """One row a result; columns are aligned, so that it reads well in a terminal too."""
    cells = [[form.format(line[key]) if key in line else "" for key, form in COLUMNS.values()] for line in results]
    rows = [list(COLUMNS), *cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    # The first two columns are text, the others are numbers.
    rule = [":" + "-" * (w - 1) if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def line(row: list[str]) -> str:
        padded = [x.ljust(w) if i < 2 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in cells)])
