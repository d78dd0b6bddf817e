"""Several processes are one run: the same losses, files written once, and no host waits for one that is gone."""

import socket
import subprocess
import time

import numpy as np
import pytest
from small import as_overrides, command, small_config, write_corpus

from flash_lm.errors import InputError
from flash_lm.jsonl import read_jsonl
from flash_lm.training.hosts import parse_hosts

pytestmark = pytest.mark.usefixtures("usual_promotion")
DEVICES = 4  # of all hosts


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    config = small_config(write_corpus(folder / "text"), folder / "cache")
    return ["--config=configs/base.py", *as_overrides(config)]


def a_place(hosts: int) -> str:
    """Word of a command, but for the number of the host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"--hosts=127.0.0.1:{free.getsockname()[1]},{hosts}"


def start(hosts: int, *words: str) -> list[subprocess.Popen]:
    if hosts == 1:
        return [command("flash_lm.train", *words, devices=DEVICES)]
    place = a_place(hosts)
    return [command("flash_lm.train", *words, f"{place},{i}", devices=DEVICES // hosts) for i in range(hosts)]


def finish(processes: list[subprocess.Popen]) -> list[str]:
    outputs = [process.communicate(timeout=300) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return [out for out, _ in outputs]


def figures(workdir) -> list[tuple]:
    return [(line["step"], line["split"], line["loss"]) for line in read_jsonl(workdir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "alone"
    finish(start(1, *words, f"--workdir={workdir}"))
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "mesh"), [(2, "(4,1,1)"), (4, "(4,1,1)"), (2, "(1,2,2)")])
def test_the_losses_are_those_of_one_host(words, alone, tmp_path, hosts, mesh):
    outputs = finish(start(hosts, *words, f"--config.mesh.shape={mesh}", f"--workdir={tmp_path / 'run'}"))
    assert "step 0 of 12" in outputs[0] and not any("step " in out for out in outputs[1:])
    for (step, split, loss), (*place, expected) in zip(figures(tmp_path / "run"), figures(alone), strict=True):
        assert [step, split] == place
        np.testing.assert_allclose(loss, expected, rtol=1e-6 if mesh == "(4,1,1)" else 1e-5)
    names = lambda folder: sorted(path.name for path in folder.iterdir())
    assert names(tmp_path / "run") == names(alone) and len(names(tmp_path / "run" / "tensorboard")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1], ids=["the_first", "another"])
def test_one_host_is_killed_and_the_others_end(words, tmp_path, killed):
    """Within a minute; all of them started again go on, and a signal to one of them ends all at the same step."""
    long = [*words, "--config.train.steps=4000", "--config.train.checkpoint_every=50", f"--workdir={tmp_path / 'run'}"]
    processes = start(2, *long)
    while not (tmp_path / "run" / "checkpoints" / "50").is_dir():
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        time.sleep(0.05)
    processes[killed].kill()
    since, left = time.monotonic(), processes[1 - killed]
    _, err = left.communicate(timeout=60)
    assert time.monotonic() - since < 60 and left.returncode, err
    # Ours if it is a step that fails, or JAX's, which ends the process when no heartbeat comes.
    assert "error: another host is gone" in err or "another task died" in err
    processes[killed].communicate()
    again = start(2, *long)
    time.sleep(1)
    deadline = time.monotonic() + 120
    while not any(int(p.name) > 50 for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdecimal()):
        assert time.monotonic() < deadline and all(process.poll() is None for process in again)
        time.sleep(0.05)
    again[1].terminate()
    outputs = finish(again)
    assert "the same command goes on from there" in outputs[0]
    steps = [step for step, split, _ in figures(tmp_path / "run") if split == "train"]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_hosts_without_rows_of_their_own_are_refused(words, tmp_path):
    processes = start(2, *words, "--config.mesh.shape=(1,1,4)", "--config.model.num_heads=4", f"--workdir={tmp_path}/r")
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and "2 hosts must have rows of their own" in err
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_hosts_with_other_settings_are_refused(words, tmp_path):
    place = a_place(2)
    settings = ("--config.train.learning_rate=0.01", "--config.train.learning_rate=0.02")
    processes = [
        command("flash_lm.train", *words, f"--workdir={tmp_path / 'r'}", setting, f"{place},{i}", devices=2)
        for i, setting in enumerate(settings)
    ]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and "the hosts differ in config" in err
    assert not (tmp_path / "r").exists()


def test_the_words_of_hosts():
    assert parse_hosts("auto") == (None, None, None)
    assert parse_hosts("10.0.0.1:1234,4,0") == ("10.0.0.1:1234", 4, 0)
    for word in ("", "x", "here,2,0", "here:1,2,2", "here:1,0,0", "here:1,2"):
        with pytest.raises(InputError, match="must be auto, or ADDRESS"):
            parse_hosts(word)
