"""A run outlives kills and a disk that is full."""

import math
import pathlib
import resource
import signal
import time

import numpy as np
import pytest
from small import as_overrides, command, finish, small_config, write_corpus

from flash_lm.analysis.results import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    return ["--config=configs/base.py", *as_overrides(small_config(write_corpus(folder / "text"), folder / "cache"))]


def losses(workdir) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_jsonl(workdir / "metrics.jsonl")]


@pytest.mark.slow
def test_a_full_disk_costs_no_checkpoint(words, tmp_path):
    """Here no file may grow beyond 64 kB, which is not enough for the second checkpoint."""
    settings = ("train.steps=400", "train.checkpoint_every=100", "train.log_every=50", "model.model_dim=64")
    words = [*words, *(f"--config.{word}" for word in settings)]
    workdir = f"--workdir={tmp_path / 'run'}"
    finish(command("flash_lm.train", *words, f"--workdir={tmp_path / 'whole'}"))
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
    assert "those before it are whole" in line
    finish(command("flash_lm.train", *words, workdir))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_kills_leave_no_trace(words, tmp_path):
    """A few of them; `scripts/survive_kills.py --kills=20` is the whole of it."""
    process = command("scripts.survive_kills", "--kills=4", "--families=flash", f"--out={tmp_path / 'out'}", *words)
    out, _ = finish(process)
    *kills, summary = read_jsonl(tmp_path / "out" / "kills.jsonl")
    assert len(kills) == 4 and summary["equal"] and summary["while_saving"] >= 2, out


def train_until(step: int, words: list[str], workdir: pathlib.Path, number: int, **options) -> str:
    """A process that is sent a signal once it has logged a step; what it prints, after checking that it ends well."""
    process = command("flash_lm.train", *words, f"--workdir={workdir}", **options)
    while not (workdir / "metrics.jsonl").exists() or losses(workdir)[-1:] < [(step, -math.inf)]:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    out, _ = finish(process)
    return out


@pytest.mark.slow
def test_a_run_moves_from_mesh_to_mesh(words, tmp_path):
    """8 devices, then 4, then 1; parameters cut over fsdp, then tensor, then whole."""
    words = [*words, "--config.train.steps=2000", "--config.train.warmup_steps=100", "--config.model.num_heads=4"]
    finish(command("flash_lm.train", *words, f"--workdir={tmp_path / 'whole'}"))
    for step, devices, shape in ((200, 8, "(1,8,1)"), (600, 4, "(1,1,4)")):
        words_here = [*words, f"--config.mesh.shape={shape}"]
        out = train_until(step, words_here, tmp_path / "run", signal.SIGTERM, devices=devices)
        assert "the same command goes on from there" in out
    finish(command("flash_lm.train", *words, f"--workdir={tmp_path / 'run'}"))
    moved, whole = (dict(losses(tmp_path / name)) for name in ("run", "whole"))
    assert moved.keys() == whole.keys()
    # To 1e-5 at first; after hundreds of steps the rounding of another order of sums has grown.
    for step, loss in whole.items():
        np.testing.assert_allclose(moved[step], loss, rtol=1e-5 if step < 100 else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_well_and_a_second_one_at_once(words, tmp_path, number):
    words = [*words, "--config.train.steps=100000", "--config.train.checkpoint_every=0", "--config.train.eval_every=0"]
    out = train_until(50, words, tmp_path / "run", number)
    assert "stopped and saved at step" in out
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    process = command("flash_lm.train", *words, f"--workdir={tmp_path / 'run'}")
    before = len(losses(tmp_path / "run"))
    while len(losses(tmp_path / "run")) < before + 50:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    for _ in range(2):
        process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode
