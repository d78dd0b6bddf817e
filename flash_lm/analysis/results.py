"""Reads what runs leave behind, and writes results."""

import json
import pathlib
from typing import Any

Line = dict[str, Any]


def read_jsonl(path: pathlib.Path) -> list[Line]:
    """The whole lines of a JSONL file; a cut last line is left out."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


def write_jsonl(path: pathlib.Path, lines: list[Line]) -> None:
    """Writes a JSONL file, in place of one that may be there."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def append_jsonl(path: pathlib.Path, lines: list[Line]) -> None:
    """Appends lines to a JSONL file; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


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
