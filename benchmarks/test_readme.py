"""The table of all results: each file is there, on its machine, with a command that can be read."""

import argparse
import importlib
import pathlib
import re
import shlex

import pytest
from small import ROOT

from flash_lm.cli.load import load_config
from flash_lm.runs.jsonl import read_jsonl

HERE = ROOT / "benchmarks"
LINK = re.compile(r"\]\(([\w./]+\.jsonl)\)")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (HERE / "README.md").read_text().splitlines()
    if line.startswith("| ") and ".jsonl)" in line
]
COMMANDS = [command for row in ROWS for command in re.findall(r"`([^`]*python -m benchmarks[^`]*)`", row[2])]


class Parsed(Exception):  # noqa: N818 (not an error)
    """A program has read its flags."""


def test_each_result_has_a_row():
    linked = {str((HERE / link).relative_to(ROOT)) for row in ROWS for link in LINK.findall(row[1])}
    found = {str(path.relative_to(ROOT)) for path in HERE.glob("*/results/**/*.jsonl")}
    assert linked == found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_the_machine_of_its_lines(row):
    for link in LINK.findall(row[1]):
        devices = {line["device"] for line in read_jsonl(HERE / link)}
        assert all(any(machine in device for machine in row[4].split(", ")) for device in devices - {"cpu"}), devices


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_read(command, monkeypatch):
    """Its program takes its flags, and its keys are those of a config."""
    words = shlex.split(command)
    words = words[words.index("-m") + 1 :]
    module = importlib.import_module(words[0])
    module = importlib.import_module(f"{words[0]}.__main__") if hasattr(module, "__path__") else module
    real, read = argparse.ArgumentParser.parse_known_args, {}

    def parse(parser, argv=None, namespace=None):
        read["flags"], read["others"] = real(parser, argv, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    with pytest.raises(Parsed):
        module.main(words[1:])
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    load_config(getattr(read["flags"], "config", None) or "quickstart", read["others"])
    assert pathlib.PurePath(read["flags"].out).parts[0] == "benchmarks"
