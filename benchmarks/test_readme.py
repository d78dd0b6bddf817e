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
