"""A run outlives kills and a disk that is full."""

import resource
import signal

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
