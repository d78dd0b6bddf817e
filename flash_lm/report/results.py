"""Reads runs' results and validation curves."""

import os
import pathlib
from collections.abc import Sequence

from flash_lm.runs.jsonl import Line, read_jsonl
from flash_lm.runs.run_name import BEST, NEWEST, RunName, run_name
from flash_lm.runs.storage import absolute

Run = str | os.PathLike[str] | RunName


def labels(runs: Sequence[Run]) -> dict[str, RunName]:
    """Labels runs: by the folder's name, with as many parent folders as are needed to make labels unique."""
    names = dict.fromkeys(run_name(run) for run in runs)
    # Labels that are not unique get one more parent folder each, until all are.
    depths, longest = dict.fromkeys(names, 1), max((len(absolute(x.workdir).parts) for x in names), default=0)
    while True:
        candidates = [_label(name, depth) for name, depth in depths.items()]
        again = [name for name, label in zip(names, candidates, strict=True) if candidates.count(label) > 1]
        if not again or depths[again[0]] == longest:  # the same folder, spelled in two ways
            return dict(zip(candidates, names, strict=True))
        for name in again:
            depths[name] += 1


def _label(name: RunName, depth: int) -> str:
    folder = "/".join(absolute(name.workdir).parts[-depth:])
    return folder + name.suffix


def newest_results(runs: Sequence[Run], split: str) -> list[Line]:
    """Reads the last result on a split of each checkpoint that has one; `run` is the run's label.

    Prefers results on the corpus of training, with rows of the training length.
    """
    newest = []
    for label, name in labels(runs).items():
        path = name.workdir / "results.jsonl"
        lines = [line for line in read_jsonl(path) if line["split"] == split] if path.exists() else []
        # The checkpoint that is asked for; then the run's corpus and the training length, if it has such lines.
        lines = _select_checkpoint(lines, name)
        lines = [line for line in lines if line.get("own_corpus", True)] or lines
        as_trained = [line for line in lines if line.get("trained_length", -1) == line.get("length")]
        newest.extend(line | {"run": label} for line in (as_trained or lines)[-1:])
    return newest


def _select_checkpoint(lines: list[Line], name: RunName) -> list[Line]:
    lines = [line for line in lines if line.get("ema", False) == name.ema]
    if name.which == BEST:
        return [line for line in lines if line.get("checkpoint") == BEST]
    # The newest checkpoint is the one with the last step.
    step = name.which
    if step == NEWEST:
        lines = [line for line in lines if line.get("checkpoint", NEWEST) == NEWEST]
        step = max((line.get("step", 0) for line in lines), default=0)
    return [line for line in lines if line.get("step", 0) == step]


def validation_curve(workdir: pathlib.Path) -> list[Line]:
    """Reads the validation lines of a run's metrics, in order."""
    return [line for line in read_jsonl(workdir / "metrics.jsonl") if line["split"] == "validation"]
