"""CONTRIBUTING.md, the templates and `make help` against the repository."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TEMPLATES = sorted((ROOT / ".github").rglob("*.*"))


def test_quoted_code_is_in_its_file():
    quotes = re.findall(r"From\s+`([\w./]+)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(quotes) == 3
    for path, code in quotes:
        assert code in (ROOT / path).read_text(encoding="utf-8"), f"quote the code of {path} as it is now"


def test_files_that_the_pages_name_exist():
    text = PAGE + "".join(path.read_text(encoding="utf-8") for path in TEMPLATES)
    linked = {path.split("#")[0] for path in re.findall(r"\]\(([^)]+)\)", PAGE)}
    named = re.findall(r"\b(?:tests|flash_lm|scripts|docs|studies|benchmarks|notebooks)/[\w./]*\w", text)
    for path in linked.union(named):
        assert (ROOT / path).exists(), path


def test_sections_that_the_page_links_to():
    for path, section in re.findall(r"\]\(([\w./]+)#([\w-]+)\)", PAGE):
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert section in {heading.lower().replace(" ", "-") for heading in headings}, f"{path}#{section}"


def test_targets_that_the_pages_name():
    text = PAGE + "".join(path.read_text(encoding="utf-8") for path in TEMPLATES)
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    assert set(re.findall(r"^make ([a-z-]+)", PAGE, re.MULTILINE)) <= targets


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_alone_lists_all_targets(tmp_path):
    """One line per target, and nothing else happens."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    command = ["make", "--no-print-directory"]  # make may run these tests itself
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert [line.split()[1] for line in output] == re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)
    assert {line.split()[1] for line in output} == set(phony.split())
    assert list(tmp_path.iterdir()) == [tmp_path / "Makefile"]


def test_the_page_is_short():
    assert len(PAGE.splitlines()) < 130
