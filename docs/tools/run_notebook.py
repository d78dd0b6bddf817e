"""Runs all cells of a notebook without Jupyter, and keeps its pictures.

    python docs/tools/run_notebook.py notebooks/add_a_family.ipynb --pictures=docs/pictures/add_a_family STEPS=60

NAME=VALUE replaces a setting of the cell that is tagged as parameters. VALUE is a Python literal, or else a text.
"""

import argparse
import ast
import json
import pathlib
import shutil
from typing import Any

import matplotlib as mpl

from flash_lm.cli.run import run
from flash_lm.errors import InputError


def execute(notebook: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs the code cells as one module.

    Args:
        notebook: the file.
        settings: values that replace the notebook's, by name.

    Returns:
        The notebook's variables.

    Raises:
        InputError: the notebook has no setting of such a name.
    """
    mpl.use("Agg")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": notebook.stem}
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), f"{notebook.stem}, cell {number}", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            if unknown := settings.keys() - names.keys():
                raise InputError(f"{notebook} has no setting {', '.join(sorted(unknown))}")
            names |= settings
    return names


def _setting(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise InputError(f"{word}: give settings as NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main(argv: list[str]) -> None:
    """Runs a notebook without Jupyter."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    parser.add_argument(
        "--pictures", type=pathlib.Path, help="folder for copies of the PNGs that the notebook writes to OUT"
    )
    arguments = parser.parse_intermixed_args(argv)
    names = execute(arguments.notebook, dict(map(_setting, arguments.settings)))
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        for path in sorted(pathlib.Path(names["OUT"]).glob("*.png")):
            shutil.copy(path, arguments.pictures)


if __name__ == "__main__":
    run(main)
