"""What parameters in bfloat16 round away: small updates, and what slow averages forget."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from flash_lm.config.experiment import Config
from flash_lm.config.registry import OPTIMIZERS
from flash_lm.training.train_state import TrainState

_MOST = 0.5  # of the numbers; a few large ones are always too large
_ADVICE = "set --config.model.param_dtype=float32"


def rounding_warnings(config: Config, state: TrainState) -> list[str]:
    """Sentences on what training in bfloat16 cannot do, one each; none if parameters are in float32.

    Args:
        config: the run's.
        state: its state before the first step.
    """
    if config.model.param_dtype != "bfloat16":
        return []
    train, found = config.train, []
    relative = OPTIMIZERS[train.optimizer].relative
    share = float(jax.jit(unmoved, static_argnums=(1, 2))(state.params, train.learning_rate, relative))
    if share > _MOST:
        found.append(
            f"warning: an update of train.learning_rate={train.learning_rate} leaves {share:.0%} of the parameters as "
            f"they are, because they are in bfloat16, which has 8 bits: raise it, or {_ADVICE}"
        )
    averages = [average for name in ("mu", "nu") for _, average in optax.tree.get_all_with_path(state.opt_state, name)]
    if train.b2 < 1 and jnp.bfloat16(train.b2) == 1 and any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(averages)):
        found.append(
            f"warning: train.b2={train.b2} is 1 in bfloat16, so the optimizer's average forgets nothing: {_ADVICE}, or "
            "lower it to 0.996"
        )
    return found


def unmoved(params: Any, rate: float, relative: bool = False) -> jax.Array:
    """Share of the numbers in bfloat16 that an update rounds to what they were.

    Args:
        params: arrays; those of another dtype do not count.
        rate: size of the update of a number.
        relative: whether that is a factor of the root mean square of its array.
    """
    found = [x for x in jax.tree.leaves(params) if x.dtype == jnp.bfloat16]
    still, total = jnp.zeros(()), sum(x.size for x in found)
    for x in found:
        wide = x.astype(jnp.float32)
        size = rate * jnp.sqrt(jnp.square(wide).mean()) if relative else rate
        still += ((wide + size).astype(jnp.bfloat16) == x).sum()
    return still / max(1, total)
