"""Schedule-free training: the average of the iterates is what is evaluated and saved (Defazio et al. 2024).

"The Road Less Scheduled", arXiv:2405.15682, equations 8 to 10. There are three points: z, which the updates move; x,
the average of z, which is the model; and y between them, where gradients are taken.

    y = (1 − β) z + β x
    z ← z + update(gradient at y)
    x ← (1 − c) x + c z,   c the share of this step in the sum of the squared rates so far

The train state's parameters are x, so that checkpoints, scores and exports have it; z is in the optimizer's state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# Of gradients, state, where they are taken, what is moved, and the learning rate.
Moves = Callable[[Any, Any, Any, Any, jax.Array], tuple[Any, Any]]


class ScheduleFreeState(NamedTuple):
    """The state of the optimizer that moves z, z itself, β, and what the weights are made of."""

    moving: Any
    z: Any
    share: jax.Array  # β
    largest_rate: jax.Array
    sum_of_squares: jax.Array


def schedule_free(init: Callable[[Any], Any], moves: Moves, share: float) -> optax.GradientTransformationExtraArgs:
    """Averages what an optimizer moves. Weights are the squares of the largest rate so far: a warm-up counts less.

    Args:
        init: makes the optimizer's state.
        moves: the optimizer, without momentum.
        share: β.
    """

    def start(params: Any) -> ScheduleFreeState:
        z = jax.tree.map(jnp.copy, params)  # not the parameters themselves, whose memory the step takes over
        return ScheduleFreeState(init(params), z, jnp.float32(share), jnp.zeros(()), jnp.zeros(()))

    def update(updates: Any, state: Any, params: Any = None, **inputs: Any) -> tuple[Any, ScheduleFreeState]:
        learning_rate = inputs["learning_rate"]
        updates, moving = moves(updates, state.moving, gradient_point(state, params), state.z, learning_rate)
        z = optax.apply_updates(state.z, updates)
        largest = jnp.maximum(state.largest_rate, learning_rate)
        total = state.sum_of_squares + largest**2
        c = jnp.where(total > 0, largest**2 / total, 0)
        averaged = jax.tree.map(lambda x, z: (c * (z - x)).astype(x.dtype), params, z)
        return averaged, ScheduleFreeState(moving, z, state.share, largest, total)

    return optax.GradientTransformationExtraArgs(start, update)


def begun_with(opt_state: Any, params: Any) -> Any:
    """A new state of the optimizer whose z is these parameters, if it averages: they replace those it was made for."""
    if not isinstance(opt_state, ScheduleFreeState):
        return opt_state
    return opt_state._replace(z=jax.tree.map(jnp.copy, params))


def gradient_point(opt_state: Any, params: Any) -> Any:
    """Where a step takes its gradient: y if the optimizer averages, otherwise the parameters themselves."""
    if not isinstance(opt_state, ScheduleFreeState):
        return params
    share = opt_state.share
    return jax.tree.map(lambda x, z: (share * x + (1 - share) * z).astype(x.dtype), params, opt_state.z)
