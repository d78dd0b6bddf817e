"""A step that is not finite is skipped and counted, or ends the run; the layer of its origin is named."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.config.registry import OPTIMIZERS
from flash_lm.errors import NonfiniteError, RunError
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.run_name import run_name
from flash_lm.training import nonfinite
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.nonfinite import NonfiniteSteps, Origin
from flash_lm.training.optimizer import Optimizer
from flash_lm.training.resume import new_state
from flash_lm.training.setup import Experiment, build_experiment
from flash_lm.training.train_loop import train
from flash_lm.training.train_state import TrainState

pytestmark = pytest.mark.usefixtures("usual_promotion")
OUTSIDE = 10**6  # a token beyond the vocabulary, whose embedding is NaN
ROW = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return small_config(write_corpus(folder / "text"), folder / "cache", "flash")


@pytest.fixture
def poison_step(monkeypatch):
    """Makes a row of step 6 begin with a token outside the vocabulary."""
    training_batches = Experiment.training_batches

    class Poisoned:
        def __init__(self, batches, step):
            self.batches, self.step, self.state = batches, step, batches.state

        def __next__(self):
            batch, self.step = next(self.batches), self.step + 1
            if self.step == 6:
                batch = batch | {"inputs_BxL": batch["inputs_BxL"].copy()}
                batch["inputs_BxL"][ROW, 0] = OUTSIDE
            return batch

    def batches(experiment, share, start_step, path):
        return Poisoned(training_batches(experiment, share, start_step, path), start_step)

    monkeypatch.setattr(Experiment, "training_batches", batches)


def make_skipping_run(config, **settings):
    config = config.copy_and_resolve_references()
    config.train.update(on_nonfinite="skip", **settings)
    return config


def saved_state(config, workdir: pathlib.Path):
    state, facts = restore(run_name(workdir), build_experiment(parse(config)).abstract)
    return state, facts


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.slow("trains a run of six steps twice")
def test_it_ends_the_run_and_is_not_saved(config, poison_step, tmp_path, debug):
    with pytest.raises(RunError) as caught:
        train(config, tmp_path, debug_nonfinite=debug)
    message = str(caught.value)
    assert message.startswith("step 6 (rows 40 to 47 in the order of training): loss nan") and "\\" not in message
    expected = f"comes out of the embedding, in row {ROW} of the batch" if debug else "use --debug_nonfinite"
    assert expected in message
    assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == 3
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl") if line["split"] == "train"][-1] == 5


@pytest.mark.slow("trains three runs, one of them with a resume")
def test_it_is_skipped_and_counted(config, poison_step, tmp_path):
    """Parameters and moments stay, to the bit; the run continues, also after a restart."""
    config = make_skipping_run(config)
    states = {}
    for stop in (5, 6):
        counter = itertools.count(1)
        train(config, tmp_path / str(stop), should_stop=lambda counter=counter, stop=stop: next(counter) == stop)
        states[stop], facts = saved_state(config, tmp_path / str(stop))
        assert facts["skipped_steps"] == stop - 5
    before, after = (jax.tree_util.tree_leaves_with_path(states[stop]) for stop in (5, 6))
    changed = [jax.tree_util.keystr(path) for (path, a), (_, b) in zip(before, after, strict=True) if (a != b).any()]
    # Adam counts the gradients in its moments; the number of steps, which sets the rate, continues.
    assert len(before) > 30 and changed == [".step"]
    counts = dict(optax.tree.get_all_with_path(states[6].opt_state, "count"))
    actual = {path[-1].tuple_name: int(count) for path, count in counts.items()}
    # The count of the schedule is kept for older checkpoints alone.
    assert actual == {"ScaleByAdamState": 5, "ScaleByScheduleState": 0} and int(states[6].step) == 6
    train(config, tmp_path / "6")
    lines = [line for line in read_jsonl(tmp_path / "6" / "metrics.jsonl") if line["split"] == "train"]
    assert [line["step"] for line in lines] == [*range(1, 6), *range(7, 13)]
    assert {line["step"]: line["skipped_steps"] for line in lines} == {
        i: int(i > 6) for i in [*range(1, 6), *range(7, 13)]
    }
    assert all(np.isfinite(line["loss"]) for line in lines)
    train(config, tmp_path / "uninterrupted")
    for a, b in zip(
        *(jax.tree.leaves(saved_state(config, tmp_path / x)[0]) for x in ("6", "uninterrupted")), strict=True
    ):
        assert np.array_equal(a, b)


@pytest.mark.slow("trains a run with another optimizer")
def test_a_non_finite_update_is_not_applied(config, tmp_path, monkeypatch):
    """Loss and gradient are finite. A word that does not occur has moments of 0, and without ε, 0 / 0 is NaN."""
    without = Optimizer(lambda config, traits: [optax.scale_by_adam(config.b1, config.b2, eps=0.0)])
    monkeypatch.setitem(OPTIMIZERS.registered, "adamw", without)
    with pytest.raises(RunError, match=r"step 1 \(rows 0 to 7 .*: loss \d.*optimizer's update") as caught:
        train(config, tmp_path, debug_nonfinite=True)
    assert "\nthis step has not been saved" in str(caught.value)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_an_evaluation_that_is_not_finite_is_not_the_best(tmp_path):
    state = {"a": jnp.ones(3)}
    state = TrainState(jnp.zeros((), jnp.int32), state, {})
    for step, loss in ((2, 1.0), (4, float("nan")), (6, 3.0), (8, float("inf"))):
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.save(step, state, {}, {"loss": loss})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "8"]


def test_too_many_in_a_row_end_the_run(config, monkeypatch):
    monkeypatch.setattr(nonfinite, "MOST_IN_A_ROW", 3)
    steps = NonfiniteSteps(build_experiment(parse(make_skipping_run(config, steps=1000))), skipped=7)
    values = {"loss": float("inf"), "grad_norm": 1.0}
    for step in (2, 3, 4, 6, 7, 8):
        assert "loss inf" in steps.record_skipped(step, values, "")
    assert steps.skipped == 13
    with pytest.raises(RunError, match="the last 4 steps were skipped"):
        steps.record_skipped(9, values, "")


def test_a_run_that_breaks_at_once_does_not_end_well(config, tmp_path):
    """The first update is finite, and no later step: a tenth of the steps in succession is no accident."""
    config = make_skipping_run(config, learning_rate=1e30, warmup_steps=0, clip=0.0)
    config.model.dropout = 0.0
    with pytest.raises(NonfiniteError, match=r"^step \d .*; the last 2 steps were skipped: lower .*$") as caught:
        train(config, tmp_path)
    assert "\n" not in str(caught.value)


def test_the_last_step_of_a_run(config):
    """A single step that is skipped at the end is an accident, unless the model is broken."""
    values = {"loss": float("nan"), "grad_norm": 1.0}
    for step in (11, 12):
        steps = NonfiniteSteps(build_experiment(parse(make_skipping_run(config))), skipped=0)
        steps.record_skipped(step, values, "")
        steps.check_end(5.0)
    with pytest.raises(NonfiniteError, match="step 12: validation loss nan; the last step was skipped"):
        steps.check_end(float("nan"))


@pytest.mark.slow("compiles the search for the origin twice")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_layer_of_its_origin_is_named(config, accumulate):
    config = config.copy_and_resolve_references()
    config.model.num_layers = 2
    config.train.accumulate = accumulate
    config.data.tokens_per_batch = 512
    experiment = build_experiment(parse(config))
    origin, params = Origin(experiment), new_state(experiment).params
    batch = next(experiment.training_batches(experiment.share()))
    assert "are finite" in origin.find(params, 0, batch)

    huge = jax.tree.map(lambda x: x, params)
    kernel = huge["layers"]["sublayer_1"]["output"]["kernel"]
    huge["layers"]["sublayer_1"]["output"]["kernel"] = kernel.at[1].set(3e38)
    assert "comes out of layer 2 of 2 (flash), in row 0" in origin.find(huge, 0, batch)
    huge["layers"]["sublayer_1"]["output"]["kernel"] = kernel.at[1, 0, 0].set(jnp.nan)
    assert "parameter layers.sublayer_1.output.kernel is not finite" in origin.find(huge, 0, batch)
    for row in (5, 6):
        inputs = batch["inputs_BxL"].copy()
        inputs[row, -1] = OUTSIDE
        assert f"out of the embedding, in row {row} of" in origin.find(params, 0, batch | {"inputs_BxL": inputs})
