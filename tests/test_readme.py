"""Each file of results that README and the pages quote is there, and each result has the command that made it."""

import itertools
import pathlib
import re

import pytest
from small import ROOT, pages

RESULTS = sorted((ROOT / "studies").glob("*/results"))
ROW = re.compile(r"^\| (`[\w./]+`(?:, `[\w./]+`)*|all else) \| (.*) \|$", re.MULTILINE)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_quoted_file_is_there(page):
    text = page.read_text()
    quoted = set(re.findall(r"(?<![\w./-])((?:studies|benchmarks)/[\w./]+)", text))
    for path in (path for path in quoted if "/NAME" not in path):  # a file that a reader adds
        assert list(ROOT.glob(path.rstrip("./") + "*")), path


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.parent.name)
def test_each_result_has_a_command(folder):
    """In README.md beside the results of a study; benchmarks/test_readme.py has the benchmarks."""
    named = [name for names, _ in ROW.findall((folder / "README.md").read_text()) for name in names.split(", ")]
    files = {path.name for path in folder.iterdir()} - {"README.md"}
    told = {name.strip("`").split("/")[0] for name in named}
    assert told - {"all else"} <= files, "a row for what is not there"
    assert "all else" in told or files <= told, files - told


def test_a_command_beside_a_file_makes_that_file():
    """Each row's --out is what the row is of, or lies in it, or is a folder of runs."""
    of = lambda folder: [(folder, *row) for row in ROW.findall((folder / "README.md").read_text())]
    rows = [*itertools.chain(*(of(folder) for folder in RESULTS))]
    assert len(rows) > 20
    for folder, names, command in rows:
        outs = [pathlib.Path(out) for out in re.findall(r"--out=(?!runs\b)([\w./]+)", command)]
        files = [folder.relative_to(ROOT) / name.strip("`") for name in names.split(", ") if name != "all else"]
        near = lambda out, files=files: any(out.is_relative_to(x) or x.is_relative_to(out) for x in files)
        assert not files or all(near(out) for out in outs), (names, command)
