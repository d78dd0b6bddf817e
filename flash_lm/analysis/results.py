"""What runs leave behind: their results and their validation curves."""

import pathlib

from flash_lm.jsonl import Line, read_jsonl


def newest_results(workdirs: list[pathlib.Path], split: str) -> list[Line]:
    """The last result on a split of each run that has any; one on rows as it was trained on, if there is one."""
    found = []
    for path in (workdir / "results.jsonl" for workdir in workdirs):
        lines = [line for line in read_jsonl(path) if line["split"] == split] if path.exists() else []
        as_trained = [line for line in lines if line.get("trained_length", -1) == line.get("length")]
        found.extend((as_trained or lines)[-1:])
    return found


def validation_curve(workdir: pathlib.Path) -> list[Line]:
    """The validation lines of a run's metrics, in order."""
    return [line for line in read_jsonl(workdir / "metrics.jsonl") if line["split"] == "validation"]
