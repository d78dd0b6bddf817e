"""Files with a JSON object a line: metrics, results, and what was changed at a resume."""

import json
import pathlib
from typing import Any

from flash_lm.errors import InputError

Line = dict[str, Any]


def read_jsonl(path: pathlib.Path) -> list[Line]:
    """The whole lines of a JSONL file; a cut last line is left out.

    Raises:
        InputError: another line is damaged.
    """
    text = path.read_text(encoding="utf-8")
    found = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].split("\n"), start=1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError:
            raise InputError(f"{path}: line {number} is damaged and no JSON: restore the file, or delete it") from None
    return found


def write_jsonl(path: pathlib.Path, lines: list[Line]) -> None:
    """Writes a JSONL file, in place of one that may be there."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def append_jsonl(path: pathlib.Path, lines: list[Line]) -> None:
    """Appends lines to a JSONL file; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
