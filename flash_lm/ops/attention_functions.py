"""Attention functions f(scores) / N over the visible keys: softmax, relu² and Laplace.

relu² is FLASH's ("Transformer Quality in Linear Time", eq. 4), Laplace is Mega's ("Moving Average Equipped Gated
Attention", eq. 16): a smooth step fitted to relu² at √½. Softmax is already normalised and ignores N.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_LAPLACE_MEAN = math.sqrt(0.5)
_LAPLACE_WIDTH = math.sqrt(0.25 / math.pi) * math.sqrt(2)

# Low enough that exp gives 0, and finite, so that a query without visible keys has no NaN in its gradient.
_HIDDEN = -1e30


def relu2(x: jax.Array) -> jax.Array:
    """max(x, 0)²."""
    return jnp.square(jnp.maximum(x, 0))


def laplace(x: jax.Array) -> jax.Array:
    """½ (1 + erf((x − √½) / (√(1/4π) √2)))."""
    return 0.5 * (1 + jax.lax.erf((x - _LAPLACE_MEAN) / _LAPLACE_WIDTH))


def _laplace_density(x: jax.Array) -> jax.Array:
    return jnp.exp(-jnp.square((x - _LAPLACE_MEAN) / _LAPLACE_WIDTH)) / (_LAPLACE_WIDTH * math.sqrt(math.pi))


class Elementwise(NamedTuple):
    """An elementwise function of the scores, and its derivative."""

    function: Callable[[jax.Array], jax.Array]
    derivative: Callable[[jax.Array], jax.Array]


ELEMENTWISE = {
    "relu2": Elementwise(relu2, lambda x: 2 * jnp.maximum(x, 0)),
    "laplace": Elementwise(laplace, _laplace_density),
    "identity": Elementwise(lambda x: x, jnp.ones_like),  # for linear attention inside a chunk
}


def _over_visible(function: Callable[[jax.Array], jax.Array]):
    def weights(scores: jax.Array, visible: jax.Array, divisor: jax.Array) -> jax.Array:
        return jnp.where(visible, function(scores) / divisor, 0)

    return weights


def masked_softmax(scores: jax.Array, visible: jax.Array, divisor: jax.Array) -> jax.Array:
    """Softmax over the visible entries of the last dimension; all zero if none is visible."""
    del divisor
    hidden_scores = jnp.where(visible, scores, _HIDDEN)
    top = jax.lax.stop_gradient(hidden_scores.max(axis=-1, keepdims=True))
    exponentials = jnp.where(visible, jnp.exp(hidden_scores - top), 0)
    total = exponentials.sum(axis=-1, keepdims=True)
    # Not maximum(total, 1): a query with one visible key has total 1, and at a tie maximum halves the gradient.
    return exponentials / jnp.where(total > 0, total, 1)


# name -> (scores (..., L, M), visible (..., L, M), divisor (..., L, 1)) -> weights (..., L, M) float32
ATTENTION_FUNCTIONS = {name: _over_visible(each.function) for name, each in ELEMENTWISE.items()}
ATTENTION_FUNCTIONS["softmax"] = masked_softmax
