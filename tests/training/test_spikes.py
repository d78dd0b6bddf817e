"""The definition of a spike of the loss, its count over a resume, and gradient norms by group."""

import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.changes import apply_changes
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.spikes import Spikes
from flash_lm.training.train_loop import train
from training.runs import stop_after


def test_a_loss_far_above_the_recent_ones_is_a_spike():
    draw = np.random.default_rng(0)
    losses = 5 * np.exp(-np.arange(300) / 100) + 0.05 * draw.normal(size=300)
    spikes = Spikes()
    assert not any(spikes.update(x) for x in losses[:200])
    assert spikes.update(losses[200] + 2) and spikes.count == 1
    assert not spikes.update(losses[201]), "the next is compared with the spike, too"


def test_the_bound_is_six_standard_deviations():
    before = [1.0, 2.0] * 32
    assert not Spikes(recent=before).update(1.5 + 6 * 0.5)
    assert Spikes(recent=before).update(1.5 + 6 * 0.5 + 1e-6)
    assert not Spikes(recent=before[:15]).update(100.0)


def test_the_count_continues_after_a_resume():
    draw = np.random.default_rng(0)
    losses = [*draw.normal(size=90), 30.0, *draw.normal(size=90), 60.0]
    full = Spikes()
    for x in losses:
        full.update(x)
    first = Spikes()
    for x in losses[:50]:
        first.update(x)
    second = Spikes(first.count, first.recent)
    for x in losses[50:]:
        second.update(x)
    assert (full.count, full.recent) == (second.count, second.recent) and full.count == 2


@pytest.mark.slow("trains a run of 30 steps twice, once with a resume")
@pytest.mark.usefixtures("usual_promotion")
def test_runs_log_spikes_and_norms_by_group(tmp_path):
    config = small_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")
    config = apply_changes(config, {"train.log_groups": True, "train.steps": 30, "train.learning_rate": 1e-3})
    train(config, tmp_path / "uninterrupted")
    train(config, tmp_path / "run", should_stop=stop_after(20))
    train(config, tmp_path / "run")
    read_train_lines = lambda name: [x for x in read_jsonl(tmp_path / name / "metrics.jsonl") if x["split"] == "train"]
    lines = [read_train_lines("uninterrupted"), read_train_lines("run")]
    for full, run in zip(*lines, strict=True):
        groups = {name: x for name, x in full.items() if name.startswith("grad_norm/")}
        assert {"grad_norm/embedding", "grad_norm/layers/sublayer_0", "grad_norm/layers/sublayer_1"} <= groups.keys()
        assert np.isclose(sum(x**2 for x in groups.values()), full["grad_norm"] ** 2, rtol=1e-4)
        assert full["loss_spikes"] == run["loss_spikes"] == 0
