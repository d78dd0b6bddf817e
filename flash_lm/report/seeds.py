"""Runs that differ only in their seed: their names, their curves, and a table with intervals and verdicts."""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence

from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.report.ratios import SEEDS, MeanRatio
from flash_lm.runs.jsonl import Line
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import RunName

_SEED = re.compile(r"[,/_-]?seed[=_-]?\d+(?=@|$)")  # of a run's name
RULE = (
    f"Ratios of perplexities, seed by seed: their geometric mean and its 95 % interval (Student's t over the seeds). "
    f"Better or worse: {SEEDS} seeds or more, and the interval is all below or all above 1."
)


def group_seeds(names: Mapping[str, RunName], results: Sequence[Line]) -> dict[str, list[str]]:
    """Groups runs whose configs differ only in the seed: the labels of each group, by a name for it.

    Args:
        names: runs by label.
        results: their final results, in any order, with the run's label and seed.
    """
    seeds = {line["run"]: line.get("seed") for line in results}
    groups: dict[str, list[str]] = {}
    for label, name in names.items():
        several = len({*seeds.values()}) > 1  # else no config needs to be read
        alike = RunFolder(name.workdir).config.to_dict() | {"seed": 0} if several else label
        groups.setdefault(json.dumps([alike, name.suffix], sort_keys=True), []).append(label)
    named: dict[str, list[str]] = {}
    for labels in groups.values():
        name = _group_name(labels)
        named[name if name not in named else ", ".join(labels)] = labels
    return named


def _group_name(labels: Sequence[str]) -> str:
    """What the labels share without their seeds, or else all of them."""
    if len(labels) == 1:
        return labels[0]
    without = dict.fromkeys(_SEED.sub("", label) for label in labels)
    return next(iter(without)) if len(without) == 1 and all(without) else ", ".join(labels)


def compare_seeds(results: Sequence[Line], groups: Mapping[str, Sequence[str]]) -> list[Line]:
    """A line per group of runs: its perplexity over the seeds, and the ratio to the first group with its verdict.

    Args:
        results: final results with run, seed and perplexity, of one text.
        groups: from `group_seeds`; the first is what the others are compared with.
    """
    by_run = {line["run"]: line for line in results}
    scores = {
        name: {by_run[run]["seed"]: by_run[run]["perplexity"] for run in runs if run in by_run}
        for name, runs in groups.items()
    }
    scores = {name: of_seeds for name, of_seeds in scores.items() if of_seeds}
    lines, first = [], next(iter(scores), "")
    for name, of_seeds in scores.items():
        values = list(of_seeds.values())
        line: Line = {
            "model": name,
            "seeds": len(values),
            "perplexity": statistics.geometric_mean(values),
            "lowest": min(values),
            "highest": max(values),
        }
        lines.append(line if name == first else line | _against(of_seeds, scores[first]))
    return lines


def _against(of_seeds: Mapping[int, float], base: Mapping[int, float]) -> Line:
    """The ratio of two groups over the seeds that both have; a verdict needs three."""
    both = sorted(of_seeds.keys() & base.keys())
    if not both:
        return {"verdict": "no seed in common"}
    ratio = MeanRatio([math.log(of_seeds[seed] / base[seed]) for seed in both], {})
    line: Line = {"ratio": ratio.mean, "verdict": f"undecided: {len(both)} of {SEEDS} seeds"}
    if len(both) < 2:
        return line
    low, high = ratio.interval
    line |= {"from": low, "to": high}
    if len(both) >= SEEDS:
        line["verdict"] = "better" if high < 1 else "worse" if low > 1 else "undecided"
    return line


def seed_table(lines: Sequence[Line]) -> str:
    """The lines of `compare_seeds` as a table below the rule that judged them."""
    columns: Columns = {
        "model": ("model", "{}"),
        "seeds": ("seeds", "{:,}"),
        "perplexity": ("perplexity", "{:.2f}"),
        "lowest": ("lowest", "{:.2f}"),
        "highest": ("highest", "{:.2f}"),
        f"ratio to {lines[0]['model']}": ("ratio", "{:.3f}"),
        "95 % from": ("from", "{:.3f}"),
        "to": ("to", "{:.3f}"),
        "verdict": ("verdict", "{}"),
    }
    return f"{RULE}\n\n{markdown_table(lines, columns)}"
