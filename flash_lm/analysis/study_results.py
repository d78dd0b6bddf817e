"""What the runs of a study of several seeds leave behind: folders named RUN_seed_N, and files that keep their lines."""

import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable

from flash_lm.analysis.claims import Run
from flash_lm.analysis.results import Line, read_jsonl, validation_curve


def collect(folder: pathlib.Path) -> tuple[list[Line], list[Line]]:
    """Scores on the validation split and validation curves of the finished runs of the study."""
    scores, curves = [], []
    for path in sorted(folder.glob("*_seed_*/results.jsonl")):
        name, seed = re.fullmatch(r"(.+)_seed_(\d+)", path.parent.name).groups()  # type: ignore[union-attr]
        about = {"run": name, "seed": int(seed)}
        scores += [line | about for line in read_jsonl(path) if line["split"] == "validation"]
        keys = ("step", "loss", "train_seconds")
        curves += [about | {key: line[key] for key in keys} for line in validation_curve(path.parent)]
    return scores, curves


def together(before: list[Line], lines: list[Line]) -> list[Line]:
    """The lines of runs that are here, and those taken over before, of runs that lie on another machine."""
    here = {(line["run"], line["seed"]) for line in lines}
    kept = [line for line in before if (line["run"], line["seed"]) not in here]
    return sorted(kept + lines, key=lambda line: (line["run"], line["seed"]))


def gather(scores: Iterable[Line], curves: Iterable[Line]) -> dict[str, dict[int, Run]]:
    """The study's runs by name and seed."""
    by_run: dict[tuple[str, int], tuple[dict[int, Line], list[Line]]] = defaultdict(lambda: ({}, []))
    trained_at: dict[tuple[str, int], int] = {}
    for line in scores:
        key = (line["run"], line["seed"])
        trained_at.setdefault(key, line["length"])  # a run is scored as it was trained first
        by_run[key][0][line["length"]] = line
    for line in curves:
        by_run[line["run"], line["seed"]][1].append(line)
    found: dict[str, dict[int, Run]] = defaultdict(dict)
    for (name, seed), (lengths, curve) in by_run.items():
        found[name][seed] = Run(lengths, trained_at[name, seed], curve)
    return found
