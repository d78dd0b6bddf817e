"""Each file of results that README and the pages quote is there, and has the command that made it."""

import re

import pytest
from small import ROOT

QUOTED = {page.name: page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
COMMANDS = (ROOT / "results" / "README.md").read_text()


@pytest.mark.parametrize("name", QUOTED)
def test_each_quoted_file_is_there_and_has_a_command(name):
    text, nothing_yet = QUOTED[name], "gpu"  # nobody has had one
    quoted = set(re.findall(r"results/([\w./]+)", text))
    quoted |= set(re.findall(r"\{results-table\} (\S+)", text)) | set(re.findall(r"\{result\}`(\S+)", text))
    for path in quoted - {f"{nothing_yet}/"}:
        path = path.rstrip("./")
        assert list((ROOT / "results").glob(path + "*")), path
        folder = path.split("/")[0]
        assert folder in ("README.md", "CLAIMS.md") or f"`{folder}" in COMMANDS, path


def test_a_command_beside_a_file_makes_that_file():
    """Each row's --out is what the row is of, or lies in it."""
    rows = re.findall(r"^\| `([\w./]+)`[^|]*\| (.*) \|$", COMMANDS, re.MULTILINE)
    assert len(rows) > 20
    for path, command in rows:
        outs = re.findall(r"--out=([\w./]+)", command)
        file = f"results/{path.rstrip('/')}"
        assert all(out.startswith(file) or file.startswith(f"{out}/") for out in outs), path
        assert (ROOT / "results" / path).exists(), path
