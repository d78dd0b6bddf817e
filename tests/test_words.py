"""Words of a command line that are spelt otherwise, or mistyped."""

import argparse
import sys

import pytest

from flash_lm import launch
from flash_lm.__main__ import COMMANDS, main
from flash_lm.cli.load import load_config
from flash_lm.cli.words import check_flags, spell
from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.evaluate import flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("runs/x --split=test", "--workdir=runs/x --split=test"),
        ("--split test runs/x", "--split test --workdir=runs/x"),
        ("--carry runs/x", "--carry --workdir=runs/x"),
        ("--no-compile-cache runs/x@best", "--no_compile_cache --workdir=runs/x@best"),
        ("--workdir runs/x", "--workdir runs/x"),
        ("--workdir=a --config.data.path b --carry", "--workdir=a --config.data.path=b --carry"),
        ("--config.data.path --carry", "--config.data.path --carry"),
        ("--workdir=a b", "--workdir=a b"),
        ("--split=test --rar 3 runs/x", "--split=test --rar 3 --workdir=runs/x"),
        ("--workdir=a --config.data.path=some-thing", "--workdir=a --config.data.path=some-thing"),
    ],
)
def test_other_spellings_of_the_same_words(words, expected):
    assert spell(flags(), words.split()) == expected.split()


def test_a_word_alone_is_no_run_where_the_folder_is_new():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", help="a new folder")
    assert spell(parser, ["runs/x"]) == ["runs/x"]


def test_the_words_of_a_command_that_is_started_are_its_own():
    words = ["--restarts=3", "flash-lm", "evaluate", "runs/x", "--results=F", "--max-tokens=3"]
    assert spell(launch.flags(), words) == words
    check_flags(launch.flags(), words)


def test_mistyped_flags_are_named_together():
    with pytest.raises(InputError) as error:
        check_flags(flags(), ["--wrkdir=x", "--splt", "--config.model.family=x", "--lr=3", "--unlike-all-others"])
    lines = str(error.value).splitlines()
    assert lines == [
        "unknown argument --wrkdir=x: did you mean --workdir=x?",
        "unknown argument --splt: did you mean --split?",
    ]


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("--lr=3e-4", "did you mean --config.train.learning_rate=3e-4?"),
        ("--num_layers=3", "did you mean --config.model.num_layers=3?"),
        ("--batch_size=32", "did you mean --config.data.tokens_per_batch=…? (in tokens"),
        ("--seed=3", "did you mean --config.seed=3?"),
        ("runs/x", "unknown argument runs/x: keys look like"),
        ("--config.train.modl_dim=3", "did you mean model.model_dim?"),
        ("--config.model.banana=3", "flash-lm keys lists the keys"),
        ("--config.batch_size=8", "did you mean data.tokens_per_batch? (in tokens: sequences times data.length)"),
        ("--config.train.max_length=8", "did you mean model.max_length?"),
        ("--config.model.chunk_sise=8", "did you mean model."),
        ("--config.model.family", "needs its value after =, as in --config.model.family=VALUE"),
    ],
)
def test_a_wrong_word_leads_to_the_key(word, advice):
    with pytest.raises(InputError) as error:
        load_config("quickstart", [word])
    assert advice in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_wrong_value_leads_to_the_right_one():
    config = load_config("quickstart", ["--config.model.family=flsh", "--config.train.schedule=cosin"])
    with pytest.raises(InputError) as error:
        parse(config)
    assert "(did you mean flash?)" in str(error.value) and "(did you mean cosine?)" in str(error.value)


def main_output(monkeypatch, capsys, *words: str) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["flash-lm", *words])
    code = None
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_door_lists_its_commands_and_knows_near_ones(monkeypatch, capsys):
    code, out, _ = main_output(monkeypatch, capsys, "--help")
    assert code is None and all(name.split("_")[0] in out for name in COMMANDS)
    code, out, err = main_output(monkeypatch, capsys, "trian")
    assert (code, out, err) == (2, "", "error: no command trian: did you mean flash-lm train?\n")
    code, out, _ = main_output(monkeypatch, capsys, "--version")
    assert code is None and out.startswith("flash_lm ")
    code, out, err = main_output(monkeypatch, capsys)
    assert code == 2 and err.startswith("usage: flash-lm COMMAND")


def test_keys_and_names_are_listed(monkeypatch, capsys):
    _, out, _ = main_output(monkeypatch, capsys, "keys", "lr", "chunks.size")
    assert out.startswith("model.chunks.size: int = ") and "\ntrain.learning_rate: float = 0.003\n" in out
    code, _, err = main_output(monkeypatch, capsys, "keys", "nosuchkey")
    assert code == 2 and err.startswith("error: no key has nosuchkey")
    _, out, _ = main_output(monkeypatch, capsys, "list", "families")
    assert "\n  flash  " in out
    _, out, _ = main_output(monkeypatch, capsys, "list", "configs")
    assert "quickstart\n" in out and "\nbase_110m:{" in out
