"""The scripts for a GPU: their commands are right, keep their time, and run at a hundredth of the size."""

import importlib
import os
import pathlib
import sys
import time
from types import SimpleNamespace

import pytest
from small import ROOT

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.parts import PARTS, SECONDS, Part, Settings
from flash_lm.errors import InputError, RunError
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")


class CheckedError(Exception):
    """Ends a program when its flags, keys and configs are right, before anything is measured."""


def settings(folder: pathlib.Path, rehearse: bool = True) -> Settings:
    return Settings(folder / "out", None, sys.executable, rehearse)


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_the_commands_of_a_part_are_right(tmp_path, monkeypatch, name, rehearse):
    """Each program checks all that it is given before it asks for the machine."""

    def checked() -> None:
        raise CheckedError

    for words in PARTS[name].commands(settings(tmp_path, rehearse)._replace(data=tmp_path)):
        module = importlib.import_module(words[0])
        module = importlib.import_module(f"{words[0]}.__main__") if hasattr(module, "__path__") else module
        monkeypatch.setattr(module, "machine", checked)
        if hasattr(module, "BareDecoding"):
            monkeypatch.setattr(module, "BareDecoding", lambda *_: SimpleNamespace(tokens_per_turn=lambda tokens: 1))
        with pytest.raises(CheckedError):
            module.main([word.replace(SECONDS, "60") for word in words[1:]])
    assert not (tmp_path / "out").exists()


def test_the_parts_fit_into_the_time():
    """All of them in 14 minutes, and each half in a call of 10; what all else relies on is checked first."""
    assert list(PARTS)[:6] == ["softmax", "curve", "fleet", "steps", "decode", "races"]
    assert all(20 < part.seconds <= 240 for part in PARTS.values())
    seconds = [part.seconds for part in PARTS.values()]
    assert sum(seconds) <= 840 and sum(seconds[:4]) <= 570 and sum(seconds[4:]) <= 570


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ([], {"a": 100, "b": 200, "c": 260}),  # at most 240 s each, from its own start
        (["--seconds=150"], {"a": 100, "b": 150, "c": 150}),
        (["--seconds=900"], {"a": 240, "b": 250, "c": 260}),
        (["c"], {"c": 80}),
    ],
)
def test_a_part_leaves_its_time_to_the_later_ones(tmp_path, monkeypatch, words, ends):
    """Each ends 10 s after its start, and may run on until these seconds."""
    clock, until = [0.0], {}

    def run_part(name, settings, end, environment):
        until[name], clock[0] = end, clock[0] + 10
        return []

    parts = {name: Part(name, seconds, (), lambda _: []) for name, seconds in {"a": 100, "b": 100, "c": 80}.items()}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    gpu.main(["--rehearse", f"--out={tmp_path}", *words])
    assert until == ends


def sleep(seconds: float) -> list[str]:
    return ["timeit", "-n1", "-r1", "-s", "import time", f"time.sleep({seconds})"]


def test_a_command_that_runs_on_is_stopped_and_what_has_no_time_is_named(tmp_path, monkeypatch, capfd):
    part = Part("x", 1, (), lambda _: [sleep(0), ["no_such_module"], sleep(60), ["timeit", "never"]])
    monkeypatch.setattr(gpu, "PARTS", {"x": part})
    monkeypatch.setattr(gpu, "LEAST", 0.1)
    start = time.monotonic()
    (failed,) = gpu.run_part("x", settings(tmp_path), start + 2, dict(os.environ))
    assert failed == "x: python -m no_such_module ended with code 1"
    assert time.monotonic() - start < 30
    printed = capfd.readouterr().out
    assert "its lines so far are kept: python -m timeit -n1 -r1 -s 'import time' 'time.sleep(60)'" in printed
    assert "x: no time is left for python -m timeit never" in printed


def test_a_command_is_told_the_seconds_that_are_left(tmp_path, monkeypatch, capfd):
    """Less what it needs to write its table."""
    monkeypatch.setattr(gpu, "PARTS", {"x": Part("x", 240, (), lambda _: [["timeit", "-n1", "-r1", SECONDS]])})
    assert not gpu.run_part("x", settings(tmp_path), time.monotonic() + 100.5, dict(os.environ))
    assert f"$ python -m timeit -n1 -r1 {100 - gpu.ENDING}" in capfd.readouterr().out


def test_a_part_without_its_packages_is_skipped(tmp_path, monkeypatch, capsys):
    part = Part("x", 240, ("json", "no_such_module", "no_such.module"), lambda _: [["no_such_module"]])
    monkeypatch.setattr(gpu, "PARTS", {"x": part})
    assert not gpu.run_part("x", settings(tmp_path), time.monotonic() + 60, {})
    assert capsys.readouterr().out == "x is skipped: this Python has no no_such_module, no_such.module\n"
    texts = part._replace(reads_data=True)
    assert texts.missing(settings(tmp_path)._replace(data=tmp_path), lambda name: name != "datasets") == ["datasets"]
    assert texts.missing(settings(tmp_path), lambda name: name != "datasets") == []


def test_a_failed_command_fails_the_run_after_the_other_parts(tmp_path, monkeypatch):
    make = lambda words: Part("x", 60, (), lambda _: [words])
    parts = {"a": make(["no_such"]), "b": make(sleep(0))}
    monkeypatch.setattr(gpu, "PARTS", parts)
    with pytest.raises(RunError, match="^a: python -m no_such ended with code 1$"):
        gpu.main(["--rehearse", f"--out={tmp_path}"])


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("REHEARSE", raising=False)
    with pytest.raises(InputError, match="no GPU, jax runs on a cpu"):
        gpu.main(["races", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_a_check_that_dies_without_a_word_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("REHEARSE", raising=False)
    dead = SimpleNamespace(stdout="", stderr="", returncode=-11)
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: dead)
    with pytest.raises(InputError, match="no GPU, python ended with code -11: run make setup"):
        gpu.main(["races", f"--out={tmp_path / 'out'}"])


def test_an_unknown_part_ends_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["stebs"])
    assert "stebs must be among softmax, curve, fleet, steps" in capsys.readouterr().err


@pytest.mark.slow("compiles what the part measures")
@pytest.mark.parametrize("name", PARTS)
def test_a_rehearsal(tmp_path, monkeypatch, capfd, name):
    """Each part ends in its time with lines; on a busy machine its later commands may have none."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "out"
    python = sys.executable if name == "peers" else "/nowhere"  # without PyTorch: a line says so
    gpu.main([name, "--rehearse", "--seconds=240", f"--out={out}", f"--python={python}"])
    files = sorted(out.rglob("*.jsonl"))
    assert files and all(read_jsonl(file) for file in files), capfd.readouterr().out
