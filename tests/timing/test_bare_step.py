"""The bare training step of the benchmarks."""

import jax
import numpy as np
import pytest
from small import small_config

from flash_lm.config.experiment import Config, parse
from flash_lm.errors import InputError
from flash_lm.families.family import complete_config
from flash_lm.timing.bare_step import BareStep

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture
def config_with(tmp_path):
    """The small config with changes; nothing of its corpus is read."""

    def make(changes: dict) -> Config:
        config = small_config("none", tmp_path)
        config.data.vocab_size = 300
        config.update_from_flattened_dict(changes)
        return complete_config(parse(config))

    return make


@pytest.mark.parametrize(
    "task", ["causal_lm", pytest.param("masked_lm", marks=pytest.mark.slow("another task: the same code"))]
)
def test_it_trains_on_its_tokens(config_with, task):
    step = BareStep(config_with({"task": task, "train.warmup_steps": 0}))
    step.start()
    losses = [step.step() for _ in range(5)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    params = jax.tree.leaves(step._started[0].params)
    assert step.parameters == sum(x.size for x in params)
    # Parameters and two moments are a part of what exists during a step, and so are the temporary arrays.
    assert step.peak_bytes > step.temp_bytes + 3 * 4 * step.parameters
    assert step.temp_bytes > 0 and step.compile_s > 0


def test_its_flops_are_three_times_those_of_the_forward_pass(config_with):
    """For one layer of a Transformer: 12 D² + V D weights per token, and the visible pairs."""
    rows, length, dim, words = 2, 16, 16, 300
    step = BareStep(
        config_with({"model.family": "transformer", "model.max_length": length, "data.tokens_per_batch": rows * length})
    )
    pairs = rows * length * (length + 1) / 2
    forward = 2 * rows * length * (12 * dim**2 + words * dim) + 2 * 2 * pairs * dim
    assert step.model_flops == pytest.approx(3 * forward)


def test_contradicting_settings_are_reported(config_with):
    with pytest.raises(InputError, match="num_heads"):
        config_with({"model.family": "transformer", "model.num_heads": 5})
