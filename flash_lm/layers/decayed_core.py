"""Attention core over a sum that decays on its way, by a factor a head or a token: linear, without a denominator."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.layers.context import Context
from flash_lm.layers.core import PlainCore
from flash_lm.layers.linear_core import LinearOptions, sums_flops
from flash_lm.ops.decayed_sums import decayed_sums, prefill_decayed, step_decayed


class DecayedInputs(NamedTuple):
    """What determines the mixing.

    q_BxHxLxK: queries.
    k_BxHxLxK: keys.
    log_decay_BxHxL: logarithm of what the sum decays by before each token, not positive, (B or 1)×H×(L or 1) float32.
    """

    q_BxHxLxK: jax.Array
    k_BxHxLxK: jax.Array
    log_decay_BxHxL: jax.Array


class DecayedCore(PlainCore):
    """o = q S, S ← e^g S + kᵀ v (see `ops.decayed_sums`); bidirectional: the same from either side."""

    def __init__(self, options: LinearOptions):
        """A core without parameters."""
        self.chunk_size = options.chunk_size

    def __call__(self, by: DecayedInputs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        assert context.segments is not None
        (q, k, log_decay), runs_BxL = by, context.segments.runs_BxL
        return decayed_sums(q, k, v, log_decay, runs_BxL, chunk_size=self.chunk_size, causal=context.causal)

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """S of no tokens, B×H×K×E float32; `capacity` is not used."""
        return jnp.zeros((batch, heads, key_width, value_width), jnp.float32)

    def prefill(
        self, by: DecayedInputs, v: jax.Array, context: Context, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """In chunks, starting from any position: the sum needs no chunk grid."""
        return prefill_decayed(
            by.q_BxHxLxK, by.k_BxHxLxK, v, by.log_decay_BxHxL, state, context.real(), chunk_size=self.chunk_size
        )

    def step(self, by: DecayedInputs, v: jax.Array, context: Context, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One product with the sum."""
        out, after = step_decayed(by.q_BxHxLxK, by.k_BxHxLxK, v, by.log_decay_BxHxL, state)
        return out, jnp.where(context.real()[:, :, None, None], after, state)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Pairs inside the chunk, and two products with the sum; bidirectional: with the sums from either side."""
        before = sums_flops(length, True, self.chunk_size, heads, key_width, value_width)
        own = 2 * heads * (key_width + value_width)  # the pair of a token with itself
        return before if causal else 2 * before - own
