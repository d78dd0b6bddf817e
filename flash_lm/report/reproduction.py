"""Tables of a paper's figures and ours, and plots of quality against step time."""

import pathlib

from flash_lm.report.figure import new_figure, round_ticks, style
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


def plot_quality_against_step_time(lines: list[Line], metric: str, path: pathlib.Path, title: str) -> None:
    """Draws one point per run and joins the runs of a family; only `prominent` runs are named, others are grey.

    Args:
        lines: results with run, family, the metric and microbatch_ms.
        metric: key of `METRICS`.
        path: the PNG to write.
        title: the title, which says what was trained.
    """
    with new_figure(path, 1, 1, (9, 6)) as (_, ((axes,),)):
        names = prominent(lines, metric)
        families = dict.fromkeys(line["family"] for line in lines)
        grey = [family for family in families if not names & {x["run"] for x in lines if x["family"] == family}]
        for i, family in enumerate([*(family for family in families if family not in grey), *grey]):
            points = [line for line in lines if line["family"] == family]
            x, y = ([point[key] for point in points] for key in ("microbatch_ms", metric))
            look = {"color": "0.75", "marker": "o", "zorder": 0} if family in grey else {}
            axes.plot(x, y, markersize=6, **(style(i) | look))
        axes.set(xscale="log", ylabel=METRICS[metric], title=title)
        axes.set_xlabel("milliseconds per microbatch of training, on one device")
        axes.margins(x=0.15, y=0.1)
        axes.set_xticks([], minor=True)
        axes.set_xticks(round_ticks([line["microbatch_ms"] for line in lines]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        _name_points(axes, [(line["microbatch_ms"], line[metric], line["run"]) for line in lines], names)


def prominent(lines: list[Line], metric: str, most: int = 12) -> set[str]:
    """Returns runs to label in a plot: those that no run beats in quality and time, then the best, up to `most`."""

    def is_beaten(line: Line) -> bool:
        return any(x["microbatch_ms"] < line["microbatch_ms"] and x[metric] < line[metric] for x in lines)

    return {line["run"] for line in sorted(lines, key=lambda line: (is_beaten(line), line[metric]))[:most]}


# Offsets of a label from its data point, in points of length. Level ones come first: they are the clearest.
_LABEL_OFFSETS = [
    *((7, -3, "left"), (-7, -3, "right")),
    *((5, 4, "left"), (5, -11, "left"), (-5, 4, "right"), (-5, -11, "right")),
    *((0, 7, "center"), (0, -14, "center")),
    *((-12, -26, "right"), (12, -26, "left"), (-12, 20, "right"), (12, 20, "left")),
]
_LEADER = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
_NEAR = 15  # points of length; a label further above or below its data point gets a leader line


def _name_points(axes, points: list[tuple[float, float, str]], names: set[str]) -> None:
    """Labels data points, each label where it covers no other label and no point, if possible."""
    from matplotlib.text import Text  # noqa: PLC0415 (an extra, and slow to import)
    from matplotlib.transforms import Bbox  # noqa: PLC0415

    # Each name goes to the first offset at which it overlaps nothing.
    at = axes.transData.transform([(x, y) for x, y, _ in points])
    taken = [Bbox.from_extents(x - 3, y - 3, x + 3, y + 3) for x, y in at]
    for x, y, name in [point for point in points if point[2] in names]:
        for dx, dy, side in _LABEL_OFFSETS:
            line = _LEADER if abs(dy) > _NEAR else None
            text = axes.annotate(
                name, (x, y), (dx, dy), textcoords="offset points", fontsize=8, ha=side, arrowprops=line
            )
            text.get_window_extent()  # moves the text to its offset
            box = Text.get_window_extent(text)  # without the line
            if not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            text = axes.annotate(name, (x, y), (5, 4), textcoords="offset points", fontsize=8)
            box = text.get_window_extent()
        taken.append(box)
