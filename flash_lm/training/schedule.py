"""Learning rate schedules: warm-up, perhaps a constant rate, and a decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flash_lm.config.train import TrainConfig

_STEP_DECAY = 0.1  # factor of the learning rate at each boundary


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from zero to the peak, then config.schedule over the remaining steps.

    With decay_steps the rate stays at the peak until that many steps are left (warm-up, stable, decay).
    """
    # The decay, over all steps after the warm-up or over the last decay_steps.
    warmup, peak, end = config.warmup_steps, config.learning_rate, config.end_learning_rate
    left = max(config.steps - warmup, 1)
    decay = config.decay_steps or left
    drops = {boundary - warmup: _STEP_DECAY for boundary in config.boundaries}
    decays = {
        "linear": lambda: optax.linear_schedule(peak, end, decay),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay, alpha=end / peak),
        "sqrt": lambda: _sqrt_decay(peak, end, decay),
        "step": lambda: optax.piecewise_constant_schedule(peak, drops),
        "constant": lambda: optax.constant_schedule(peak),
    }

    # Joined from the end to the beginning: decay, then the constant rate before it, then the warm-up.
    parts, ends = [decays[config.schedule]()], []
    if decay < left:
        parts, ends = [optax.constant_schedule(peak), *parts], [warmup + left - decay]
    if warmup:
        # The first step is number 0; a rate of zero would waste it.
        parts, ends = [optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), *parts], [warmup, *ends]
    return optax.join_schedules(parts, ends) if ends else parts[0]


def same_until(one: TrainConfig, other: TrainConfig, steps: int) -> bool:
    """Whether two schedules have the same learning rates, to the bit, in the first `steps` steps."""
    step = jnp.arange(steps)
    one_rate, other_rate = (np.broadcast_to(learning_rate(x)(step), (steps,)) for x in (one, other))
    return bool(np.array_equal(one_rate, other_rate))


def _sqrt_decay(peak: float, end: float, steps: int) -> optax.Schedule:
    """Decay as end + (peak − end) (1 − √(t / steps)) (Hägele et al. 2024, arXiv:2405.18392, section 3)."""

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        done = jnp.clip(jnp.asarray(step, jnp.float32) / steps, 0, 1)
        return end + (peak - end) * (1 - jnp.sqrt(done))

    return rate
