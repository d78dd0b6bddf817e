"""Tables of a paper's figures and ours, and plots of quality against step time."""

import pathlib

from flash_lm.report.figure import SCREEN, Output, new_figure, round_ticks, style
from flash_lm.report.markdown import markdown_table
from flash_lm.runs.jsonl import Line

METRICS = {
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "word_perplexity_eos": "perplexity per word, line ends counted",
    "bits_per_byte": "bits per byte",
}


def reproduction_table(lines: list[Line], metric: str) -> str:
    """Returns a Markdown table, in the order of the lines.

    Args:
        lines: results with run, parameters, the metric, microbatch_ms, speedup and rated_seconds (all steps at that
            rate); and with paper, if a paper has a figure.
        metric: key of `METRICS`.
    """
    paper = {f"{METRICS[metric]}, paper": ("paper", "{:.3f}"), "ours": (metric, "{:.3f}")}
    columns = {
        "run": ("run", "{}"),
        "parameters": ("parameters", "{:,}"),
        **(paper if any("paper" in line for line in lines) else {METRICS[metric]: (metric, "{:.3f}")}),
        "ms per microbatch": ("microbatch_ms", "{:,.0f}"),
        "times as fast": ("speedup", "{:.2f}"),
        "training s": ("rated_seconds", "{:,.0f}"),
    }
    return markdown_table(lines, columns)


def plot_quality_against_step_time(
    lines: list[Line], metric: str, path: pathlib.Path, title: str, output: Output = SCREEN
) -> None:
    """Draws one point per run, with its name, and joins the runs of a family.

    Args:
        lines: results with run, family, the metric, microbatch_ms and device.
        metric: key of `METRICS`.
        path: the file to write.
        title: the title, which says what was trained; a paper's figure has none.
        output: formats and width.
    """
    with new_figure(path, 1, 1, (9, 3 + 0.14 * len(lines)), output) as (_, ((axes,),)):
        for i, family in enumerate(dict.fromkeys(line["family"] for line in lines)):
            points = [line for line in lines if line["family"] == family]
            x, y = ([point[key] for point in points] for key in ("microbatch_ms", metric))
            axes.plot(x, y, markersize=5, **style(i))
        device = " and ".join(dict.fromkeys(line["device"] for line in lines if "device" in line))
        axes.set(xscale="log", ylabel=METRICS[metric], title="" if output.on_paper else title)
        axes.set_xlabel(f"milliseconds per microbatch of training\n{device}")
        axes.margins(x=0.1, y=0.1)
        axes.set_xticks([], minor=True)
        axes.set_xticks(round_ticks([line["microbatch_ms"] for line in lines]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        _name_points(axes, [(line["microbatch_ms"], line[metric], line["run"]) for line in lines])


def _name_points(axes, points: list[tuple[float, float, str]]) -> None:
    """Writes each point's name near it, where it covers no other name and no point, if there is room."""
    from adjustText import adjust_text  # noqa: PLC0415 (an extra, and slow to import)

    x, y, names = zip(*points, strict=True)
    size = 8 if len(points) < 20 else 7
    texts = [axes.text(*point, fontsize=size) for point in zip(x, y, names, strict=True)]
    line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.5}
    adjust_text(texts, x=list(x), y=list(y), ax=axes, expand=(1.1, 1.3), arrowprops=line)
