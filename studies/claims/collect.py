"""Collects the results of a study with several seeds from folders named RUN_seed_N."""

import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable

from flash_lm.report.results import validation_curve
from flash_lm.runs.jsonl import Line, read_jsonl
from flash_lm.runs.run_name import NEWEST
from studies.claims.evidence import Run

_CURVE_KEYS = ("step", "loss", "tokens", "train_seconds")


def collect(folder: pathlib.Path) -> tuple[list[Line], list[Line]]:
    """Reads the scores and validation curves of the finished runs in a folder."""
    scores, curves = [], []
    for path in sorted(folder.glob("*_seed_*/results.jsonl")):
        name, seed = re.fullmatch(r"(.+)_seed_(\d+)", path.parent.name).groups()  # type: ignore[union-attr]
        about = {"run": name, "seed": int(seed)}
        newest_checkpoint = [line for line in read_jsonl(path) if line.get("own_corpus", True) and _is_newest(line)]
        newest = {(line["split"], line["length"]): line | about for line in newest_checkpoint}
        scores += newest.values()
        curves += [about | {key: line[key] for key in _CURVE_KEYS} for line in validation_curve(path.parent)]
    return scores, curves


def _is_newest(line: Line) -> bool:
    return line.get("checkpoint", NEWEST) == NEWEST


def merge_lines(before: list[Line], lines: list[Line]) -> list[Line]:
    """Merges new lines with earlier lines of other runs, such as those of other machines; returns them sorted."""
    new_runs = {(line["run"], line["seed"]) for line in lines}
    kept = [line for line in before if (line["run"], line["seed"]) not in new_runs]
    return sorted(kept + lines, key=lambda line: (line["run"], line["seed"]))


def group_runs(scores: Iterable[Line]) -> dict[str, dict[int, Run]]:
    """Groups score lines into runs, by name and seed."""
    runs: dict[str, dict[int, Run]] = defaultdict(dict)
    for line in scores:
        run = runs[line["run"]].setdefault(line["seed"], Run({}, line["trained_length"]))
        runs[line["run"]][line["seed"]] = Run({**run.scores, (line["split"], line["length"]): line}, run.trained_at)
    return runs
