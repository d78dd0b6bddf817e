"""A paper's figures and ours side by side, and quality against the time of a step."""

import pathlib

from flash_lm.analysis.results import Line
from flash_lm.analysis.table import markdown_table

METRICS = {
    "perplexity": "perplexity a token",
    "word_perplexity": "perplexity a word",
    "bits_per_byte": "bits a byte",
}


def reproduction_table(lines: list[Line], metric: str) -> str:
    """Markdown, in the order of the lines.

    Args:
        lines: with run, parameters, the metric, step_ms, speedup and train_seconds; paper where the paper has a figure.
        metric: key of `METRICS`.
    """
    columns = {
        "run": ("run", "{}"),
        "parameters": ("parameters", "{:,}"),
        f"{METRICS[metric]}, paper": ("paper", "{:.3f}"),
        "ours": (metric, "{:.3f}"),
        "ms a step": ("step_ms", "{:,.0f}"),
        "times as fast": ("speedup", "{:.2f}"),
        "training s": ("train_seconds", "{:,.0f}"),
    }
    return markdown_table(lines, columns)


def plot_quality_against_step_time(lines: list[Line], metric: str, path: pathlib.Path, title: str) -> None:
    """One point a run, named; the runs of a family are joined.

    Args:
        lines: with run, family, the metric and step_ms.
        metric: key of `METRICS`.
        path: of the PNG.
        title: says what was trained.
    """
    # Matplotlib is an extra, and slow to import.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for i, family in enumerate(dict.fromkeys(line["family"] for line in lines)):
        points = [line for line in lines if line["family"] == family]
        x, y = ([point[key] for point in points] for key in ("step_ms", metric))
        axes.plot(x, y, ("-", "--", "-.", ":")[i % 4], marker="osv^D"[i % 5], markersize=6, color=f"C{i % 10}")
        for point in points:
            at = (point["step_ms"], point[metric])
            axes.annotate(point["run"], at, xytext=(5, 5), textcoords="offset points", fontsize=8, color=f"C{i % 10}")
    axes.set(xscale="log", xlabel="milliseconds a training step", ylabel=METRICS[metric], title=title)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("{x:,.0f}")
    axes.margins(x=0.15, y=0.1)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
