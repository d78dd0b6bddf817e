"""Recall of models as a table and a picture: by model, against the decode state, and against the time per token."""

import pathlib
from collections.abc import Sequence

from flash_lm.report.figure import SCREEN, Output, new_figure, round_ticks, style
from flash_lm.report.markdown import markdown_table
from flash_lm.runs.jsonl import Line

_NARROW = 10  # greatest over smallest value, below which the axis has round numbers instead of powers of ten
_KNOWN = {"short_convolution": "conv.", "num_layers": "layers"}  # keys in other words


def recall_table(lines: list[Line]) -> str:
    """Returns a Markdown table, the best model first; `failed` counts seeds whose loss did not stay finite."""
    rows = [line | line.get("by_part", {}) for line in sorted(lines, key=lambda line: -line.get("accuracy", -1))]
    parts = dict.fromkeys(part for line in lines for part in line.get("by_part", {}))
    columns = {
        "model": ("model", "{}"),
        "width": ("width", "{}"),
        "accuracy": ("accuracy", "{:.1%}"),
        "lowest": ("lowest", "{:.1%}"),
        "highest": ("highest", "{:.1%}"),
        **{part: (part, "{:.1%}") for part in parts},
        "seeds": ("seeds", "{}"),
        "failed": ("failed", "{}"),
        "rate": ("rate", "{:g}"),
        "steps": ("step", "{:,.0f}"),
        "state, bytes": ("state_bytes", "{:,}"),
        "ms per token": ("ms_a_token", "{:.2f}"),
        "parameters": ("parameters", "{:,}"),
    }
    return markdown_table(rows, columns)


def short_labels(names: Sequence[str]) -> dict[str, str]:
    """Labels of models such as flash+short_convolution=3: the family, and what differs of their keys, in few words.

    >>> short_labels(["flash+taps=3+gau.query_key=dense", "based+taps=3", "based+taps=3+short_convolution=4"])
    {'flash+taps=3+gau.query_key=dense': 'flash, dense', 'based+taps=3': 'based', \
'based+taps=3+short_convolution=4': 'based, conv. 4'}
    """
    words = {name: name.split("+") for name in dict.fromkeys(names)}
    shared = set.intersection(*(set(parts[1:]) for parts in words.values()))
    return {
        name: ", ".join([parts[0], *(_short(x) for x in parts[1:] if x not in shared)]) for name, parts in words.items()
    }


def _short(word: str) -> str:
    """KEY=VALUE in few words: the value if it is a word, else with the last part of the key."""
    key, _, value = word.partition("=")
    last = key.rpartition(".")[2]
    if "," in value:
        return f"{last} of {len(value.split(','))}"
    return value if value.isalpha() else f"{_KNOWN.get(last, last)} {value}"


def plot_recall(lines: list[Line], path: pathlib.Path, output: Output = SCREEN) -> None:
    """Draws accuracy by model, against bytes of state and against ms per token; a curve per model, over its widths.

    Models that do not decode have no state, and are in the first panel alone.
    """
    lines = [line for line in lines if "accuracy" in line]
    device = " and ".join(dict.fromkeys(line["device"] for line in lines if "device" in line))
    axes_of = (
        ("state_bytes", "decode state per sequence, bytes"),
        ("ms_a_token", f"decoding, ms per token, 16 sequences\n{device}"),
    )
    axes_of = [(key, label) for key, label in axes_of if any(key in line for line in lines)]
    labels = short_labels([line["model"] for line in lines])
    rows, columns = output.arrange(1 + len(axes_of))
    best = {name: max(line["accuracy"] for line in lines if line["model"] == name) for name in labels}
    order = sorted(labels, key=lambda name: best[name])
    with new_figure(path, rows, columns, (4.5, 2.2 + 0.22 * len(labels)), output) as (figure, grid):
        by_model, *others = grid.flat
        for i, name in enumerate(labels):
            points = sorted((line for line in lines if line["model"] == name), key=lambda line: line["width"])
            by_model.errorbar(
                **_bars(points, [order.index(name)] * len(points), across=True), **style(i) | {"linestyle": ""}
            )
            for axes, (key, _) in zip(others, axes_of, strict=True):
                if with_key := [line for line in points if key in line]:
                    axes.errorbar(**_bars(with_key, [line[key] for line in with_key]), **style(i), label=labels[name])
        by_model.set_yticks(range(len(order)), [labels[name] for name in order])
        by_model.set(xlabel="recalled values, %", xlim=(-2, 102))
        for axes, (key, label) in zip(others, axes_of, strict=True):
            axes.set_xscale("log")
            values = [line[key] for line in lines if key in line]
            if max(values) < _NARROW * min(values):
                axes.xaxis.set_major_formatter("{x:,g}")
                axes.set_xticks(round_ticks(values))
                axes.tick_params(axis="x", which="minor", labelbottom=False)
            axes.set(xlabel=label, ylabel="recalled values, %", ylim=(-2, 102))
        seeds = max(line["seeds"] for line in lines)
        figure.suptitle("one seed" if seeds == 1 else f"median, lowest and highest of {seeds} seeds")
        if others:
            figure.legend(*others[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)


def _bars(lines: Sequence[Line], at: Sequence[float], across: bool = False) -> dict:
    """Arguments of matplotlib's error bars: accuracies in percent, from the lowest to the highest seed."""
    low, y, high = ([100 * line[key] for line in lines] for key in ("lowest", "accuracy", "highest"))
    spread = [[b - a for a, b in zip(*ends, strict=True)] for ends in ((low, y), (y, high))]
    return {"markersize": 5, "capsize": 2} | (
        {"x": y, "y": at, "xerr": spread} if across else {"x": at, "y": y, "yerr": spread}
    )
