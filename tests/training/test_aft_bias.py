"""AFT learns its position bias with the default settings, on a task that cannot be learned without it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.families.family import complete
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.train_state import ModelFunction, init_state
from flash_lm.training.train_step import make_scheduled_step

pytestmark = pytest.mark.usefixtures("usual_promotion")

VOCAB, B, L, STEPS = 64, 2, 128, 100


def loss_after_training(window: int) -> float:
    """Loss of predicting the input two positions back. Without a bias, a weight depends on the token alone."""
    config = get_config()
    config.model.update(family="aft_local", vocab_size=VOCAB, max_length=L, num_layers=1, model_dim=32, init="lecun")
    config.model.aft.window = window
    parsed = parse(config)
    settings = dataclasses.replace(parsed.train, steps=STEPS, warmup_steps=10, clip=0.1)
    model = ModelFunction(complete(parsed.model), seed=0)
    optimizer = make_optimizer(settings, model.traits())
    step = jax.jit(make_scheduled_step(model, optimizer, settings, seed=0))
    state, draw = init_state(model, optimizer), np.random.default_rng(0)
    positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (B, L))
    losses = []
    for _ in range(STEPS):
        inputs = draw.integers(VOCAB, size=(B, L), dtype=np.int32)
        targets = np.roll(inputs, 2, axis=1)
        mask = np.broadcast_to(np.arange(L) >= 2, (B, L)).astype(np.float32)
        batch = {"inputs_BxL": inputs, "targets_BxL": targets, "loss_mask_BxL": mask}
        batch |= {"segment_ids_BxL": np.ones((B, L), np.int32), "positions_BxL": positions}
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return float(np.mean(losses[-10:]))


@pytest.mark.slow("trains two models for 100 steps")
def test_the_bias_learns_and_its_window_matters():
    """A window of 2 does not reach back far enough.

    With an eps of 1e-6 and the common learning rate, the two losses were alike.
    """
    assert loss_after_training(window=8) < 0.5 * loss_after_training(window=2)
