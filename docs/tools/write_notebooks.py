"""Writes the cells that all notebooks share: the Colab badge and the installation.

    python docs/tools/write_notebooks.py

The repository's address is one setting: [tool.flash_lm] repository in pyproject.toml. While it is empty, there is no
badge, and the installation cell says what to do.
"""

import argparse
import json
import pathlib
import re
import tomllib
from typing import Any

from flash_lm.cli.run import run
from flash_lm.errors import InputError

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
_BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{name}/blob/main/notebooks/{notebook})"
)
# Some import studies or benchmarks, which are of the repository and not of the installed package.
_FIND = """import importlib.util
import pathlib
import subprocess
import sys

here = pathlib.Path.cwd()
root = next((folder for folder in (here, *here.parents) if (folder / "studies" / "protocol").is_dir()), {otherwise})"""
_INSTALL = """
if not root.exists():
    subprocess.run(["git", "clone", "--quiet", "--depth=1", "{repository}", str(root)], check=True)
if importlib.util.find_spec("flash_lm") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{{root}}[plot]"], check=True)
sys.path.append(str(root))"""
_NO_ADDRESS = """
if root is None or importlib.util.find_spec("flash_lm") is None:
    raise ModuleNotFoundError("run pip install '.[plot]' in a copy of the repository, and start this notebook there")
sys.path.append(str(root))"""


def repository() -> str:
    """The address in pyproject.toml; empty if there is none.

    Raises:
        InputError: Colab cannot open it.
    """
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flash_lm"]["repository"]
    if address and not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address):
        raise InputError(f"[tool.flash_lm] repository={address} must be https://github.com/OWNER/NAME, or empty")
    return address


def with_shared_cells(notebook: dict[str, Any], name: str, address: str) -> dict[str, Any]:
    """A notebook whose second cell installs, and whose title is followed by a badge if there is an address.

    Args:
        notebook: as JSON; its first cell is the title.
        name: of its file.
        address: of the repository, or empty.
    """
    title, *rest = [cell for cell in notebook["cells"] if cell["id"] not in ("badge", "install")]
    badge = _BADGE.format(name=address.removeprefix("https://github.com/"), notebook=name)
    find = _FIND.format(otherwise='here / "flash_lm_repository"' if address else None)
    install = find + (
        _INSTALL.format(repository=address) if address else _NO_ADDRESS.replace("import subprocess\n", "")
    )
    shared = [_cell("markdown", "badge", badge)] if address else []
    return notebook | {"cells": [title, *shared, _cell("code", "install", install), *rest]}


def text_of(notebook: dict[str, Any]) -> str:
    """The notebook's text as Jupyter writes it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, name: str, source: str) -> dict[str, Any]:
    more: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": name, "metadata": {}, "source": source.splitlines(keepends=True)} | more


def main(argv: list[str]) -> None:
    """Writes the shared cells into every notebook."""
    argparse.ArgumentParser(description=main.__doc__).parse_args(argv)
    address = repository()
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(text_of(with_shared_cells(notebook, path.name, address)), encoding="utf-8")


if __name__ == "__main__":
    run(main)
