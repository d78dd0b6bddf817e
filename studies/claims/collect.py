"""Results of a study with several seeds: folders named RUN_seed_N, and files that keep their lines."""

import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable

from flash_lm.report.results import validation_curve
from flash_lm.runs.jsonl import Line, read_jsonl
from flash_lm.runs.run_name import NEWEST
from studies.claims.evidence import Run

_OF_A_CURVE = ("step", "loss", "tokens", "train_seconds")


def collect(folder: pathlib.Path) -> tuple[list[Line], list[Line]]:
    """Scores and validation curves of the finished runs of a study."""
    scores, curves = [], []
    for path in sorted(folder.glob("*_seed_*/results.jsonl")):
        name, seed = re.fullmatch(r"(.+)_seed_(\d+)", path.parent.name).groups()  # type: ignore[union-attr]
        about = {"run": name, "seed": int(seed)}
        scored = [line for line in read_jsonl(path) if line.get("own_corpus", True) and _is_newest(line)]
        newest = {(line["split"], line["length"]): line | about for line in scored}
        scores += newest.values()
        curves += [about | {key: line[key] for key in _OF_A_CURVE} for line in validation_curve(path.parent)]
    return scores, curves


def _is_newest(line: Line) -> bool:
    return line.get("checkpoint", NEWEST) == NEWEST


def merged(before: list[Line], lines: list[Line]) -> list[Line]:
    """The lines of the runs here, and earlier lines of runs on other machines."""
    here = {(line["run"], line["seed"]) for line in lines}
    kept = [line for line in before if (line["run"], line["seed"]) not in here]
    return sorted(kept + lines, key=lambda line: (line["run"], line["seed"]))


def gather(scores: Iterable[Line]) -> dict[str, dict[int, Run]]:
    """The runs of a study by name and seed."""
    found: dict[str, dict[int, Run]] = defaultdict(dict)
    for line in scores:
        run = found[line["run"]].setdefault(line["seed"], Run({}, line["trained_length"]))
        found[line["run"]][line["seed"]] = Run({**run.scores, (line["split"], line["length"]): line}, run.trained_at)
    return found
