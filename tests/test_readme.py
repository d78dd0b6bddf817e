"""Each quoted file of results exists, and each result has the command that made it."""

import itertools
import pathlib
import re

import pytest
from small import ROOT, pages

RESULTS = sorted((ROOT / "studies").glob("*/results"))
ROW = re.compile(r"^\| (`[\w./]+`(?:, `[\w./]+`)*|all else) \| (.*) \|$", re.MULTILINE)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_quoted_file_exists(page):
    text = page.read_text()
    quoted = set(re.findall(r"(?<![\w./-])((?:studies|benchmarks)/[\w./]+)", text))
    for path in (path for path in quoted if "/NAME" not in path):  # NAME stands for a file of the reader
        assert list(ROOT.glob(path.rstrip("./") + "*")), path


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.parent.name)
def test_each_result_has_a_command(folder):
    """In README.md next to the results of a study; benchmarks/test_readme.py has the benchmarks."""
    named = [name for names, _ in ROW.findall((folder / "README.md").read_text()) for name in names.split(", ")]
    files = {path.name for path in folder.iterdir()} - {"README.md"}
    documented = {name.strip("`").split("/")[0] for name in named}
    assert documented - {"all else"} <= files, "a row without its files"
    assert "all else" in documented or files <= documented, files - documented


def test_the_command_of_a_file_makes_that_file():
    """The --out or --results of each row is the path of the row, lies in it, or is a folder of runs."""
    read_rows = lambda folder: [(folder, *row) for row in ROW.findall((folder / "README.md").read_text())]
    rows = [*itertools.chain(*(read_rows(folder) for folder in RESULTS))]
    assert len(rows) > 20
    for folder, names, command in rows:
        outs = [pathlib.Path(out) for out in re.findall(r"--(?:out|results)=(?!runs\b)([\w./]+)", command)]
        files = [folder.relative_to(ROOT) / name.strip("`") for name in names.split(", ") if name != "all else"]
        near = lambda out, files=files: any(out.is_relative_to(x) or x.is_relative_to(out) for x in files)
        assert not files or all(near(out) for out in outs), (names, command)
