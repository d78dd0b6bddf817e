"""The table of all results: each file exists, with its machine; tests/test_docs.py reads the commands."""

import re

import pytest
from small import ROOT

from flash_lm.runs.jsonl import read_jsonl

HERE = ROOT / "benchmarks"
LINK = re.compile(r"\]\(([\w./]+\.jsonl)\)")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (HERE / "README.md").read_text().splitlines()
    if line.startswith("| ") and ".jsonl)" in line
]


def test_each_result_has_a_row():
    linked = {str((HERE / link).relative_to(ROOT)) for row in ROWS for link in LINK.findall(row[1])}
    files = {str(path.relative_to(ROOT)) for path in HERE.glob("*/results/**/*.jsonl")}
    assert linked == files


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_the_machine_of_its_lines(row):
    for link in LINK.findall(row[1]):
        devices = {line["device"] for line in read_jsonl(HERE / link)}
        assert all(any(machine in device for machine in row[4].split(", ")) for device in devices - {"cpu"}), devices


CLEAN_FROM = "2026-11-30"  # older lines of code that no commit has are footnoted


def quotes_uncommitted_code(row: list[str], lines: list[dict]) -> bool:
    """Whether a row quotes lines of code with uncommitted changes, measured after these were last allowed."""
    return row[3] >= CLEAN_FROM and any(line.get("dirty") is not False for line in lines)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_quotes_lines_of_a_commit(row):
    lines = [line for link in LINK.findall(row[1]) for line in read_jsonl(HERE / link)]
    assert not quotes_uncommitted_code(row, lines)


def test_a_new_row_of_uncommitted_code_would_be_found():
    row = lambda date: ["How fast?", "x", "python", date, "EPYC"]
    assert quotes_uncommitted_code(row("2026-12-01"), [{"dirty": False}, {"dirty": True}])
    assert quotes_uncommitted_code(row("2026-12-01"), [{"dirty": None}])
    assert not quotes_uncommitted_code(row("2026-12-01"), [{"dirty": False}])
    assert not quotes_uncommitted_code(row("2026-11-29"), [{"dirty": True}])
