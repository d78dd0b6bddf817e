"""Warnings on training in bfloat16: small updates are rounded away, and slow averages forget nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from flash_lm.config.experiment import Config
from flash_lm.config.registry import OPTIMIZERS
from flash_lm.training.train_state import TrainState

_MOST = 0.5  # share of the numbers; a few are always too large for an update
_ADVICE = "set --config.model.param_dtype=float32"


def rounding_warnings(config: Config, state: TrainState) -> list[str]:
    """Warnings, one sentence each; none if parameters are in float32.

    Args:
        config: config of the run.
        state: its state before the first step.
    """
    if config.model.param_dtype != "bfloat16":
        return []
    # Updates that are rounded away.
    train, messages = config.train, []
    relative = OPTIMIZERS[train.optimizer].relative
    share = float(jax.jit(unchanged_share, static_argnums=(1, 2))(state.params, train.learning_rate, relative))
    if share > _MOST:
        messages.append(
            f"warning: an update of train.learning_rate={train.learning_rate} leaves {share:.0%} of the parameters as "
            f"they are, because they are in bfloat16, which has 8 bits: raise it, or {_ADVICE}"
        )

    # A decay β₂ that rounds to 1, so that the second moment never forgets.
    averages = [average for name in ("mu", "nu") for _, average in optax.tree.get_all_with_path(state.opt_state, name)]
    if train.b2 < 1 and jnp.bfloat16(train.b2) == 1 and any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(averages)):
        messages.append(
            f"warning: train.b2={train.b2} is 1 in bfloat16, so the optimizer's average forgets nothing: {_ADVICE}, or "
            "lower it to 0.996"
        )
    return messages


def unchanged_share(params: Any, rate: float, relative: bool = False) -> jax.Array:
    """Share of the numbers in bfloat16 that an update leaves unchanged, because the sum is rounded.

    Args:
        params: arrays; those of another dtype do not count.
        rate: size of the update of each number.
        relative: whether the size is relative to the root mean square of the array.
    """
    arrays = [x for x in jax.tree.leaves(params) if x.dtype == jnp.bfloat16]
    unchanged, total = jnp.zeros(()), sum(x.size for x in arrays)
    for x in arrays:
        wide = x.astype(jnp.float32)
        size = rate * jnp.sqrt(jnp.square(wide).mean()) if relative else rate
        unchanged += ((wide + size).astype(jnp.bfloat16) == x).sum()
    return unchanged / max(1, total)
