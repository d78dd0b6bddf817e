"""Gathers chosen tokens (global tokens of Longformer, targets of the loss) to the front of each sequence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.visibility import KeySpan


class Compact(NamedTuple):
    """Indices of the chosen tokens of each sequence; arrays are (B or 1)×….

    order_BxN: their indices in the sequence, in order, and then those of other tokens.
    chosen_BxN: which of these are chosen tokens.
    before_BxM: number of chosen tokens before each index 0 … L.
    """

    order_BxN: jax.Array
    chosen_BxN: jax.Array
    before_BxM: jax.Array

    def take(self, x_BxHxLxK: jax.Array) -> jax.Array:
        """The chosen tokens' vectors: B×H×N×K."""
        return jnp.take_along_axis(x_BxHxLxK, self.order_BxN[:, None, :, None], axis=2)

    def put_back(self, x_BxHxNxK: jax.Array) -> jax.Array:
        """Inverse of `take`: vectors of chosen tokens at their indices, B×H×L×K; others get that of a chosen token."""
        index_BxL = jnp.minimum(self.before_BxM[:, :-1], x_BxHxNxK.shape[2] - 1)
        return jnp.take_along_axis(x_BxHxNxK, index_BxL[:, None, :, None], axis=2)

    def queries(self, key_span: KeySpan) -> KeySpan:
        """Visibility of the chosen tokens as queries; the others see nothing."""
        index, first, stop = (jnp.take_along_axis(x, self.order_BxN, axis=1) for x in key_span)
        return KeySpan(index, first, jnp.where(self.chosen_BxN, stop, first))

    def keys(self, key_span: KeySpan) -> KeySpan:
        """Visibility of the chosen tokens as keys."""
        first, stop = (jnp.take_along_axis(self.before_BxM, x, axis=1) for x in (key_span.first_BxL, key_span.stop_BxL))
        return KeySpan(key_span.index_BxL, first, stop)


def index_chosen(chosen_BxL: jax.Array, most: int) -> Compact:
    """Finds the chosen tokens of each sequence.

    Args:
        chosen_BxL: which tokens are chosen, (B or 1)×L.
        most: N, no smaller than the number of chosen tokens in any row.
    """
    order_BxN = jnp.argsort(~chosen_BxL, axis=1, stable=True)[:, :most].astype(jnp.int32)
    before_BxM = jnp.pad(jnp.cumsum(chosen_BxL, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    return Compact(order_BxN, jnp.take_along_axis(chosen_BxL, order_BxN, axis=1), before_BxM)
