"""Reads JSON files that may be damaged, or come from somebody else."""

import json
import pathlib
from typing import Any

_MOST_NESTED = 64  # levels; our files have less than ten


def load_json(path: pathlib.Path) -> Any:
    """Reads a JSON file; raises OSError if it cannot be read, else as `parse_json`."""
    if not path.is_file():  # to open a pipe would wait for ever
        raise FileNotFoundError(f"{path} is no regular file")
    return parse_json(path.read_text(encoding="utf-8"))


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; raises ValueError if it is not JSON, or nested so deeply that Python cannot walk it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # Walk down level by level, without recursion.
    level = [value]
    for _ in range(_MOST_NESTED):
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        if not (level := [x for values in inner for x in values]):
            return value
    raise ValueError("nested too deeply")
