"""labels.json in the folder of a run or an export: the names of the labels that its model predicts."""

import json
import pathlib
from collections.abc import Sequence

from flash_lm.errors import InputError
from flash_lm.runs.json_file import load_json

NAME = "labels.json"


def write_labels(folder: pathlib.Path, labels: Sequence[str]) -> None:
    """Writes the names, if the model has any, for `read_labels`."""
    if labels:
        (folder / NAME).write_text(json.dumps(labels, ensure_ascii=False) + "\n", encoding="utf-8")


def read_labels(folder: pathlib.Path) -> tuple[str, ...]:
    """Reads the names of the labels; empty if the model predicts words.

    Raises:
        InputError: the file is damaged.
    """
    # Only runs with labels have the file.
    path = folder / NAME
    try:
        names = load_json(path) if path.exists() else []
    except (OSError, ValueError):
        names = None  # damaged
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path} is damaged: restore it, or train into another --workdir")
    return tuple(names)
