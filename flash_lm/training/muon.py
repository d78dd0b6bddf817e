"""Muon: orthogonalized momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Stacked layers are orthogonalized one after another, so that the updates of a layer do not depend on the number of
layers, to the bit; a single matrix has no loop, and its rounding may differ. `optax.contrib.scale_by_muon` rounds a
batch of matrices differently from one matrix, and the Newton-Schulz iteration amplifies the difference.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_MOMENTUM = 0.95
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # coefficients of x, x³ and x⁵
_STEPS = 5  # Newton-Schulz iterations
_RMS = 0.2  # of an update before the learning rate, about that of Adam's


class MuonState(NamedTuple):
    """Number of steps, and the average of the gradients."""

    count: jax.Array
    average: Any


def scale_by_muon() -> optax.GradientTransformation:
    """Turns gradients of matrices, perhaps with leading layer dimensions, into updates for a learning rate of 1.

    The momentum is Nesterov's, with the bias correction of `optax.contrib.scale_by_muon`: the average as it will be one
    step later is divided by 1 − β^(t + 1), the gradient by 1 − β^t. Its author's code has neither; a common factor
    would change nothing, so the gradient's share alone differs, by less and less. Updates have the size of Adam's, so
    that one learning rate suits both (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        count = state.count + 1
        average = optax.tree.update_moment(updates, state.average, _MOMENTUM, 1)
        momentum = optax.tree.bias_correction(average, _MOMENTUM, count + 1)
        gradient = optax.tree.bias_correction(updates, _MOMENTUM, count)
        nesterov = jax.tree.map(lambda a, g: _MOMENTUM * a + (1 - _MOMENTUM) * g, momentum, gradient)
        return jax.tree.map(_orthogonalize_layers, nesterov), MuonState(count, average)

    return optax.GradientTransformation(init, update)


def _orthogonalize_layers(x_xIxO: jax.Array) -> jax.Array:
    """Orthogonalizes each layer's matrix, scaled to a root mean square of about 0.2, like Adam's updates."""
    rows, columns = x_xIxO.shape[-2:]
    x_NxIxO = x_xIxO.reshape(-1, rows, columns)
    return jax.lax.map(_newton_schulz, x_NxIxO).reshape(x_xIxO.shape) * _RMS * max(rows, columns) ** 0.5


def _newton_schulz(x_IxO: jax.Array) -> jax.Array:
    """Newton-Schulz iteration x ← a x + b (x xᵀ) x + c (x xᵀ)² x, which brings x = U S Vᵀ close to U Vᵀ."""
    a, b, c = _POLYNOMIAL
    tall = x_IxO.shape[0] > x_IxO.shape[1]
    x = x_IxO.T if tall else x_IxO  # the smaller product
    x /= jnp.sqrt(jnp.square(x).sum()) + 1e-8
    for _ in range(_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x
