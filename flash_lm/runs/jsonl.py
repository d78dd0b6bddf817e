"""JSONL files, one JSON object per line: metrics, results, and changes at a resume."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from flash_lm.config.addresses import is_remote
from flash_lm.errors import InputError
from flash_lm.runs.json_file import parse_json
from flash_lm.runs.storage import explain_errors

Line = dict[str, Any]


def read_jsonl(path: pathlib.Path) -> list[Line]:
    """Reads the complete lines of a JSONL file; a truncated last line is left out.

    Raises:
        InputError: another line is damaged.
    """
    # A process that was killed may have left a part of a last line.
    content, lines = path.read_bytes(), []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n"), start=1):
        try:
            lines += [_object(line)] if line.strip() else []
        except ValueError:  # of JSON, or of UTF-8
            raise InputError(f"{path}: line {number} is damaged (not JSON): restore the file, or delete it") from None
    return lines


def _object(line: bytes) -> Line:
    if not isinstance(value := parse_json(line), dict):
        raise ValueError("not a JSON object")
    return value


def read_lines(path: pathlib.Path) -> list[Line]:
    """Reads the lines of a JSONL file as `read_jsonl`; none if the file does not exist."""
    try:
        return read_jsonl(path)
    except FileNotFoundError:
        return []


def write_jsonl(path: pathlib.Path, lines: list[Line]) -> None:
    """Writes a JSONL file; replaces an existing one."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def append_jsonl(path: pathlib.Path, lines: list[Line]) -> None:
    """Appends lines to a JSONL file, instead of a truncated last one; creates its folder if necessary.

    Raises:
        InputError: the file is in an object store, and cannot be written; or a line of it is damaged.
    """
    if is_remote(path):  # nothing grows there
        with explain_errors(path):
            write_jsonl(path, read_lines(path) + lines)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # A process that was killed may have left a part of a line.
    with open(path, "ab+") as file:
        file.seek(0)
        content = file.read()
        if not content.endswith(b"\n"):  # else another process may have appended a line by now
            file.truncate(content.rfind(b"\n") + 1)
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


def group_lines(lines: Sequence[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    """Groups lines by the values of these keys, None where a line has none, in their order."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(key) for key in keys), []).append(line)
    return groups
