"""One flag means one thing in all commands: a folder, a file, a number, a switch or words."""

import argparse
import collections
import importlib
import importlib.util

import pytest

from flash_lm.__main__ import COMMANDS
from flash_lm.cli.types import any_path, local_path, positive

# Flags that name a folder or a model: a run's name with its checkpoint where one is read, else a path.
NAMES = {"--workdir", "--model"}
PATHS = (local_path, any_path)


def kind(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "switch"
    if action.type in PATHS:
        what = (action.help or "").partition(";")[0]
        return "folder" if "folder" in what else "file"
    return {int: "number", positive: "number", float: "real number"}.get(action.type, "words")


def kinds(parsers: dict[str, argparse.ArgumentParser]) -> dict[str, dict[str, list[str]]]:
    """Which commands use each flag as which kind: {"--out": {"folder": ["compare", "export"]}}."""
    found: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for name, parser in parsers.items():
        for action in parser._actions:
            for flag in action.option_strings:
                found[flag][kind(action)].append(name)
    return {flag: dict(uses) for flag, uses in found.items()}


@pytest.fixture(scope="module")
def uses():
    # tests/test_light_imports.py fails for a command without a module.
    names = [name for name in COMMANDS if importlib.util.find_spec(f"flash_lm.{name}")]
    return kinds({name: importlib.import_module(f"flash_lm.{name}").flags() for name in names})


def test_a_flag_is_of_one_kind_in_all_commands(uses):
    assert {flag: each for flag, each in uses.items() if len(each) > 1 and flag not in NAMES} == {}


@pytest.mark.parametrize(("flag", "of_kind"), [("--out", "folder"), ("--results", "file"), ("--pairs", "number")])
def test_kinds(uses, flag, of_kind):
    assert list(uses[flag]) == [of_kind]


def test_a_conflict_is_found():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=any_path, help="a JSONL file")
    compare = importlib.import_module("flash_lm.compare").flags()
    assert kinds({"compare": compare, "new": parser})["--out"] == {"folder": ["compare"], "file": ["new"]}
