"""A paper's figures and ours side by side, and quality against the time of training steps."""

import pathlib

from flash_lm.analysis.drawing import drawing, style
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
        lines: with run, parameters, the metric, microbatch_ms, speedup and train_seconds; and paper, where the paper
            has a figure.
        metric: key of `METRICS`.
    """
    columns = {
        "run": ("run", "{}"),
        "parameters": ("parameters", "{:,}"),
        f"{METRICS[metric]}, paper": ("paper", "{:.3f}"),
        "ours": (metric, "{:.3f}"),
        "ms a microbatch": ("microbatch_ms", "{:,.0f}"),
        "times as fast": ("speedup", "{:.2f}"),
        "training s": ("train_seconds", "{:,.0f}"),
    }
    return markdown_table(lines, columns)


def plot_quality_against_step_time(lines: list[Line], metric: str, path: pathlib.Path, title: str) -> None:
    """One point a run, named; the runs of a family are joined.

    Args:
        lines: with run, family, the metric and microbatch_ms.
        metric: key of `METRICS`.
        path: of the PNG.
        title: says what was trained.
    """
    with drawing(path, 1, 1, (9, 6)) as (_, ((axes,),)):
        for i, family in enumerate(dict.fromkeys(line["family"] for line in lines)):
            points = [line for line in lines if line["family"] == family]
            x, y = ([point[key] for point in points] for key in ("microbatch_ms", metric))
            axes.plot(x, y, markersize=6, **style(i))
            for at, point in zip(zip(x, y, strict=True), points, strict=True):
                look = {"fontsize": 8, "color": style(i)["color"]}
                axes.annotate(point["run"], at, xytext=(5, 5), textcoords="offset points", **look)
        axes.set(xscale="log", ylabel=METRICS[metric], title=title)
        axes.set_xlabel("milliseconds a microbatch of training, on one device")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("{x:,.0f}")
        axes.margins(x=0.15, y=0.1)
