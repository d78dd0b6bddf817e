"""Work that several processes share: each task has a file of lines, which is written whole when it is done."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping

from flash_lm.errors import InputError
from flash_lm.runs.jsonl import Line, read_jsonl, read_lines, write_jsonl
from flash_lm.runs.lock import take


@contextlib.contextmanager
def begun_here(path: pathlib.Path) -> Iterator[bool]:
    """Whether this process may do a task; another one cannot begin it until the block ends.

    Args:
        path: of the task's lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        yield take(file) is None


def is_made(file: pathlib.Path, known: str, hashes: Mapping[str, str] | None = None) -> bool:
    """Whether the lines of a task are there.

    Args:
        file: of the lines.
        known: what identifies the task's config.
        hashes: former hash -> today's, of lines that another version wrote.

    Raises:
        InputError: they are of another config.
    """
    lines, hashes = read_lines(file), hashes or {}
    if any(hashes.get(line["study_hash"], line["study_hash"]) != known for line in lines):
        raise InputError(
            f"{file} is of another config, rate, texts or scores: write to another folder, or move it away, and it is "
            "made again"
        )
    return bool(lines)


def made_lines(folder: pathlib.Path) -> list[Line]:
    """The lines of all tasks whose files are in a folder."""
    return [line for file in sorted(folder.glob("*.jsonl")) for line in read_jsonl(file)]


def write_made(file: pathlib.Path, lines: list[Line], known: str) -> None:
    """Writes the lines of a task, all or none; see `is_made`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    write_jsonl(partial, [line | {"study_hash": known} for line in lines])
    os.replace(partial, file)
