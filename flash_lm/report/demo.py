"""What the demo shows: perplexity against training time and step time against length, and sentences on who is ahead."""

import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from flash_lm.report.figure import new_figure, style
from flash_lm.report.markdown import pivot
from flash_lm.runs.jsonl import Line


def plot_demo(
    curves: Mapping[str, Sequence[Line]], steps: Sequence[Line], trained_length: int, path: pathlib.Path
) -> None:
    """Draws two panels: validation perplexity against training time, and milliseconds per step against the length.

    Args:
        curves: validation lines with `rated_seconds`, by family.
        steps: lines of `timing.by_length`.
        trained_length: sequence length of training.
        path: the PNG to write.
    """
    lengths = sorted({line["length"] for line in steps})
    first = steps[0]
    with new_figure(path, 1, 2, (5.5, 4.5)) as (figure, ((left, right),)):
        for i, (family, lines) in enumerate(curves.items()):
            left.plot(
                [x["rated_seconds"] for x in lines],
                [x["perplexity"] for x in lines],
                label=family,
                markersize=4,
                **style(i),
            )
            times = sorted((x["length"], x["step_ms"]) for x in steps if x["family"] == family)
            right.plot(*zip(*times, strict=True), markersize=4, **style(i))
        left.set(yscale="log", ylabel="validation perplexity per token", title=f"Quality, at length {trained_length:,}")
        left.set_xlabel(f"training time, s (steps timed side by side)\n{first['device']}")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter("{x:g}")
        left.set_xlim(left=0)
        right.set_xscale("log", base=2)
        right.set(yscale="log", xticks=lengths, title="Speed")
        right.set_ylabel(f"ms per training step of {first['tokens_per_step']:,} tokens")
        right.set_xlabel(f"sequence length, tokens\n{first['device']}")
        right.xaxis.set_major_formatter("{x:,.0f}")
        right.yaxis.set_major_formatter("{x:,g}")
        right.yaxis.set_minor_formatter("{x:,g}")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(curves), frameon=False)


def step_time_table(steps: Sequence[Line]) -> str:
    """Milliseconds per step, a row per family and a column per length."""
    first = steps[0]
    title = f"milliseconds per training step of {first['tokens_per_step']:,} tokens, by sequence length"
    return f"{title}, {first['device']}\n\n{pivot([*steps], 'family', 'length', 'step_ms', '{:,.0f}')}"


def sentences(curves: Mapping[str, Sequence[Line]], steps: Sequence[Line]) -> list[str]:
    """A sentence on where each family is ahead of the others, in quality and in speed, from these lines alone.

    Args:
        curves: as of `plot_demo`; the last line is of the end of training.
        steps: as of `plot_demo`.
    """
    return [_quality(curves), *(_speed(family, steps) for family in curves)]


def _quality(curves: Mapping[str, Sequence[Line]]) -> str:
    """Who has the lowest perplexity after the same steps, and after the same time."""
    last = {family: lines[-1]["perplexity"] for family, lines in curves.items()}
    best = min(last, key=lambda family: last[family])
    same_steps = ", ".join(f"{family} {x:.1f}" for family, x in sorted(last.items(), key=lambda pair: pair[1]))
    # The latest time to which every curve goes.
    end = min(lines[-1]["rated_seconds"] for lines in curves.values())
    at_end = {family: _at(lines, end) for family, lines in curves.items()}
    fastest = min(at_end, key=lambda family: at_end[family])
    same_time = ", ".join(f"{family} {x:.1f}" for family, x in sorted(at_end.items(), key=lambda pair: pair[1]))
    who = "it is also ahead" if fastest == best else f"{fastest} is ahead"
    return (
        f"Quality, at the length of training: {best} has the lowest validation perplexity after equal steps "
        f"({same_steps}); {who} after equal time, {end:.0f} s ({same_time})."
    )


def _at(lines: Sequence[Line], seconds: float) -> float:
    """The perplexity at a time: between two points its logarithm is a straight line."""
    times, logs = [line["rated_seconds"] for line in lines], [math.log(line["perplexity"]) for line in lines]
    return math.exp(np.interp(seconds, times, logs))


def _speed(family: str, steps: Sequence[Line]) -> str:
    """At which lengths a family has the shortest step, and from where on."""
    ms = {(line["family"], line["length"]): line["step_ms"] for line in steps}
    lengths = sorted({length for _, length in ms})
    families = {name for name, _ in ms}
    others = {n: min((ms[x, n], x) for x in families - {family}) for n in lengths}
    ahead = [n for n in lengths if ms[family, n] < others[n][0]]
    if not ahead:
        nearest = min(lengths, key=lambda n: ms[family, n] / others[n][0])
        ratio, other = ms[family, nearest] / others[nearest][0], others[nearest][1]
        return (
            f"Speed of {family}: at none of these lengths the fastest; at {nearest:,} its step takes {ratio:.2f} times "
            f"as long as that of {other}."
        )
    best = max(ahead, key=lambda n: others[n][0] / ms[family, n])
    ratio, other = others[best][0] / ms[family, best], others[best][1]
    where = f"the fastest at {_spans(ahead, lengths)}"
    return f"Speed of {family}: {where}; at {best:,} it is {ratio:.2f} times as fast as {other}."


def _spans(ahead: Sequence[int], lengths: Sequence[int]) -> str:
    """Lengths in words, neighbours as a span."""
    groups: list[list[int]] = []
    for n in lengths:
        if n in ahead:
            if groups and lengths.index(groups[-1][-1]) == lengths.index(n) - 1:
                groups[-1].append(n)
            else:
                groups.append([n])
    return " and ".join(f"{x[0]:,} to {x[-1]:,}" if len(x) > 1 else f"{x[0]:,}" for x in groups)
