"""A run survives kills and a full disk."""

import contextlib
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from small import command, finish, override_flags, python, small_config, write_corpus

from flash_lm.cli.run import run
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.train import main
from flash_lm.training import interrupt
from flash_lm.training.interrupt import stop_on_signal

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    return ["--config=configs/base.py", *override_flags(small_config(write_corpus(folder / "text"), folder / "cache"))]


def losses(workdir) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_jsonl(workdir / "metrics.jsonl")]


@pytest.mark.slow("starts four processes that train up to 400 steps")
def test_a_full_disk_costs_no_checkpoint(words, tmp_path):
    """No file may grow beyond 64 kB, which is not enough for the second checkpoint."""
    settings = ("train.steps=400", "train.checkpoint_every=100", "train.log_every=50", "model.model_dim=64")
    words = [*words, *(f"--config.{word}" for word in settings)]
    workdir = f"--workdir={tmp_path / 'run'}"
    finish(command("flash_lm.train", *words, f"--workdir={tmp_path / 'uninterrupted'}"))
    first = command("flash_lm.train", *words, workdir)
    while not (tmp_path / "run" / "checkpoints" / "100").is_dir():
        assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, resource.RLIM_INFINITY))
    full = command("flash_lm.train", *words, workdir, preexec_fn=limit)
    _, err = full.communicate(timeout=300)
    assert full.returncode == 1, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "no checkpoint could be written into" in line and "(File too large" in line
    assert "earlier checkpoints are complete" in line
    finish(command("flash_lm.train", *words, workdir))
    assert losses(tmp_path / "run") == losses(tmp_path / "uninterrupted")


@pytest.mark.slow("starts and kills several processes that train")
def test_kills_leave_no_trace(words, tmp_path):
    """A few kills; the full test is `benchmarks/checkpoints/kills.py --kills=20`."""
    process = command("scripts.survive_kills", "--kills=4", "--families=flash", f"--out={tmp_path / 'out'}", *words)
    out, _ = finish(process)
    *kills, summary = read_jsonl(tmp_path / "out" / "kills.jsonl")
    assert len(kills) == 4 and summary["equal"] and summary["while_saving"] >= 1, out


STOP_AFTER = """
import itertools, pathlib, sys
from flash_lm.cli.load import load_config
from flash_lm.training.train_loop import train
steps, workdir, config, *words = sys.argv[1:]
counter = itertools.count(1)
train(load_config(config.partition("=")[2], words), pathlib.Path(workdir), lambda: next(counter) == int(steps))
"""


@pytest.mark.slow("starts four processes that train")
def test_a_run_moves_from_mesh_to_mesh(words, tmp_path):
    """8 devices, then 4, then 1: parameters are sharded over fsdp, then over tensor, then not at all."""
    words = [*words, "--config.model.num_heads=4"]
    finish(command("flash_lm.train", *words, f"--workdir={tmp_path / 'uninterrupted'}"))
    for devices, shape in ((8, "(1,8,1)"), (4, "(1,1,4)"), (1, "(1,1,1)")):
        overrides = [str(tmp_path / "run"), *words, f"--config.mesh.shape={shape}"]
        finish(python("-c", STOP_AFTER, "4", *overrides, devices=devices))
    resumed, uninterrupted = losses(tmp_path / "run"), losses(tmp_path / "uninterrupted")
    assert [step for step, _ in resumed] == [step for step, _ in uninterrupted] and resumed[-1][0] == 12
    np.testing.assert_allclose([loss for _, loss in resumed], [loss for _, loss in uninterrupted], rtol=1e-5)


SIGNALS = [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.slow("starts a process that trains for each signal")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_run_well(words, tmp_path, number):
    settings = ("train.steps=100000", "train.checkpoint_every=0", "train.eval_every=0")
    words = [*words, *(f"--config.{word}" for word in settings), f"--workdir={tmp_path / 'run'}"]
    usual = lambda: [signal.signal(each, signal.SIG_DFL) for each in SIGNALS]  # a shell ignores some in the background
    process = command("flash_lm.train", *words, preexec_fn=usual)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(losses(tmp_path / "run")) < 50:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 75 and "stopped and saved at step" in out
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name) == losses(tmp_path / "run")[-1][0]


# Prints a line per signal. `busy`: the main thread runs no Python code for a long time.
WAITS = """
import hashlib, signal, sys, time
from flash_lm.training import interrupt
from flash_lm.training.interrupt import stop_on_signal
if sys.argv[1] != "at once":
    interrupt._ONE_EVENT_S = 0.05
for number in interrupt._SIGNALS:  # a shell ignores some in what it starts in the background
    signal.signal(number, signal.SIG_DFL)
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with stop_on_signal() as should_stop:
    print("ready", flush=True)
    if sys.argv[1] == "busy":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)
    while not should_stop():
        time.sleep(0.01)
    print("asked to stop", flush=True)
    time.sleep(60)
"""


def start_waiting(how):
    process = subprocess.Popen([sys.executable, "-c", WAITS, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_at_once(number):
    with start_waiting("") as process:
        process.send_signal(number)
        assert process.stdout.readline() == "asked to stop\n"
        time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(30) == 128 + number


def test_two_signals_at_once_are_one():
    """`timeout` and a closing terminal send two signals."""
    with start_waiting("at once") as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.01)
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "asked to stop\n"
        time.sleep(0.2)
        assert process.poll() is None
        process.kill()


def test_two_signals_end_a_process_that_is_busy():
    with start_waiting("busy") as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT


def test_a_signal_that_is_ignored_stays_ignored():
    """As under nohup."""
    with start_waiting("ignored") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked to stop\n"
        process.kill()


def test_handlers_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_on_signal() as should_stop:
        assert not should_stop()
        signal.raise_signal(signal.SIGUSR1)
        assert should_stop()
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_run_that_is_stopped_is_not_finished(words, tmp_path, monkeypatch):
    """Then `train && evaluate` stops, and a job script can submit the run again."""
    stops = iter([False, True])
    monkeypatch.setattr(interrupt, "stop_on_signal", lambda: contextlib.nullcontext(lambda: next(stops, False)))
    monkeypatch.setattr(sys, "argv", ["train", *words, f"--workdir={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as stopped:
        run(main)
    assert stopped.value.code == 75
    run(main)  # to its end
