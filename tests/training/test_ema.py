"""Averages of the parameters: compared with a float64 loop; skipped steps, resume, and the commands that use them."""

import numpy as np
import pytest
from small import small_config, write_corpus

import flash_lm
from flash_lm.config.changes import apply_changes
from flash_lm.errors import InputError
from flash_lm.inference.export import export
from flash_lm.inference.model import load_model
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.train_loop import train

pytestmark = [pytest.mark.usefixtures("usual_promotion"), pytest.mark.slow("trains several runs")]

DECAY = 0.4  # smaller than the first steps' (1 + step) / (10 + step) from the sixth on


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that keeps the checkpoints of all steps."""
    folder = tmp_path_factory.mktemp("ema")
    config = small_config(write_corpus(folder / "corpus"), folder / "cache")
    config = apply_changes(
        config, {"train.ema": DECAY, "train.checkpoint_every": 1, "train.keep": 99, "train.steps": 9}
    )
    train(config, folder / "run")
    return config, folder / "run"


def flat(name):
    return np.concatenate([np.ravel(x) for x in _leaves(load_model(name).params)]).astype(np.float64)


def _leaves(tree):
    return [leaf for x in tree.values() for leaf in (_leaves(x) if isinstance(x, dict) else [x])]


def test_the_average_equals_that_of_a_loop(run):
    _, folder = run
    expected = flat(f"{folder}@1@ema")
    for step in range(2, 10):  # the decay is at most (1 + n) / (10 + n) at step n, from 0
        decay = min(DECAY, step / (9 + step))
        expected = decay * expected + (1 - decay) * flat(f"{folder}@{step}")
        actual = flat(f"{folder}@{step}@ema")
        assert np.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(actual - flat(folder)).max() > 1e-3


def test_it_is_evaluated_with_the_parameters(run):
    _, folder = run
    line = read_jsonl(folder / "metrics.jsonl")[-1]
    for name, key in ((folder, "loss"), (f"{folder}@ema", "ema_loss")):
        (result,) = evaluate(name, "validation")
        assert np.isclose(line[key], result["loss"], rtol=1e-6)
        assert result.get("ema", False) == (key == "ema_loss")
    assert line["loss"] != line["ema_loss"] and np.isclose(line["ema_perplexity"], np.exp(line["ema_loss"]))


def test_a_resumed_run_has_the_same_average(run, tmp_path):
    config, folder = run
    steps = iter([False] * 4 + [True])
    train(config, tmp_path / "run", should_stop=lambda: next(steps))
    train(config, tmp_path / "run")
    assert np.array_equal(flat(f"{tmp_path / 'run'}@ema"), flat(f"{folder}@ema"))


def test_a_mesh_has_the_same_average(run, tmp_path):
    config, folder = run
    train(apply_changes(config, {"mesh.shape": (2, 2, 2)}), tmp_path / "run")
    assert np.allclose(flat(f"{tmp_path / 'run'}@ema"), flat(f"{folder}@ema"), rtol=1e-3, atol=2e-3)


def test_it_can_be_exported_and_trained_further(run, tmp_path):
    config, folder = run
    export(load_model(f"{folder}@ema"), tmp_path / "out", "mit")
    text = "the cat"
    exported, average = (flash_lm.load(name).score(text) for name in (tmp_path / "out", f"{folder}@ema"))
    assert exported == average != flash_lm.load(folder).score(text)
    child = {"train.init_from": f"{folder}@ema", "train.steps": 1, "train.warmup_steps": 0, "train.learning_rate": 1e-9}
    train(apply_changes(config, child), tmp_path / "child")
    for name in ("child", "child@ema"):
        assert np.allclose(flat(tmp_path / name), flat(f"{folder}@ema"), atol=1e-6)


def test_runs_without_an_average_are_reported(run, tmp_path):
    config, folder = run
    train(apply_changes(config, {"train.ema": 0.0, "train.steps": 1, "train.warmup_steps": 0}), tmp_path / "without")
    with pytest.raises(InputError, match="train.ema is off"):
        load_model(f"{tmp_path / 'without'}@ema")
    with pytest.raises(InputError, match="leave @ema out, or use train.init_from"):
        train(apply_changes(config, {"train.branch_from": f"{folder}@ema", "train.steps": 12}), tmp_path / "branch")
    with pytest.raises(InputError, match=r"train.ema=0.4 there, 0.9 here"):
        train(apply_changes(config, {"train.ema": 0.9}), folder)
