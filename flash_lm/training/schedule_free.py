"""Schedule-free training: the average of the iterates is evaluated and saved (Defazio et al. 2024).

"The Road Less Scheduled", arXiv:2405.15682, equations 8 to 10, with three points: z, which the updates move; x, the
average of z, which is the model; and y between them, where gradients are taken.

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

# (gradients, optimizer state, y, z, learning rate) -> (updates of z, optimizer state)
UpdateFunction = Callable[[Any, Any, Any, Any, jax.Array], tuple[Any, Any]]


class ScheduleFreeState(NamedTuple):
    """The state of the optimizer that moves z; z; β; and what the weight c is computed from."""

    moving: Any
    z: Any
    share: jax.Array  # β
    largest_rate: jax.Array
    sum_of_squares: jax.Array


def schedule_free(
    init: Callable[[Any], Any], compute_updates: UpdateFunction, share: float
) -> optax.GradientTransformationExtraArgs:
    """Averages the iterates z of an optimizer, with weights η²; η is the largest rate so far: a warm-up counts less.

    Args:
        init: initialises the optimizer's state.
        compute_updates: the optimizer, without momentum.
        share: β.
    """

    def start(params: Any) -> ScheduleFreeState:
        z = jax.tree.map(jnp.copy, params)  # not the parameters themselves, whose memory the step takes over
        return ScheduleFreeState(init(params), z, jnp.float32(share), jnp.zeros(()), jnp.zeros(()))

    def update(updates: Any, state: Any, params: Any = None, **inputs: Any) -> tuple[Any, ScheduleFreeState]:
        # z moves by the optimizer's update, from the gradient at y.
        learning_rate = inputs["learning_rate"]
        updates, moving = compute_updates(updates, state.moving, gradient_point(state, params), state.z, learning_rate)
        z = optax.apply_updates(state.z, updates)
        # x moves towards z by c, the share of this step in the sum of the weights.
        largest = jnp.maximum(state.largest_rate, learning_rate)
        total = state.sum_of_squares + largest**2
        c = jnp.where(total > 0, largest**2 / total, 0)
        averaged = jax.tree.map(lambda x, z: (c * (z - x)).astype(x.dtype), params, z)
        return averaged, ScheduleFreeState(moving, z, state.share, largest, total)

    return optax.GradientTransformationExtraArgs(start, update)


def reset_iterate(opt_state: Any, params: Any) -> Any:
    """Sets z of a new optimizer state to these parameters, for a model whose parameters were replaced."""
    if not isinstance(opt_state, ScheduleFreeState):
        return opt_state
    return opt_state._replace(z=jax.tree.map(jnp.copy, params))


def gradient_point(opt_state: Any, params: Any) -> Any:
    """The point of a step's gradient: y = (1 − β) z + β x if the optimizer averages, else the parameters."""
    if not isinstance(opt_state, ScheduleFreeState):
        return params
    share = opt_state.share
    return jax.tree.map(lambda x, z: (share * x + (1 - share) * z).astype(x.dtype), params, opt_state.z)
