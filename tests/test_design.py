"""The table of packages in docs/design.md equals the import contract, and lists all packages."""

import re
import tomllib

from small import ROOT

PACKAGE = ROOT / "flash_lm"


def rows() -> list[set[str]]:
    """The packages of each row of the table."""
    text = (ROOT / "docs" / "design.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [set(re.findall(r"`(\w+)/?`", cell)) for cell in cells]


def test_the_table_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one for one in contracts if one.get("containers") == ["flash_lm"])
    assert rows() == [set(re.split(r" \| ", line)) for line in layers["layers"]] and layers["exhaustive"]


def test_the_table_is_the_tree():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert set().union(*rows()) == modules | folders


def test_no_contract_has_an_exception():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert not any("ignore_imports" in one for one in contracts)
