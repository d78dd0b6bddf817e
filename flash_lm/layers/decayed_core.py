"""Linear attention with scalar decay (RetNet, Mamba-2): S_t = e^{g_t} S_{t−1} + k_tᵀ v_t, o_t = q_t S_t.

There is one decay per head, fixed or per token, and no denominator.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.layers.attention_core import PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.kernel_packages import compute_by_package
from flash_lm.layers.linear_core import chunk_work
from flash_lm.ops.kernels.choice import choose_backend
from flash_lm.ops.scalar_decay import Kernel, decayed_sums, prefill_decayed, step_decayed

_RATES, _STEPS = (1.0, 16.0), (1e-3, 0.1)  # ranges of the initial A and Δ in Mamba-2's code


class DecayedInputs(NamedTuple):
    """Queries, keys and decays; queries and keys have H heads, or one that all share.

    q_BxHxLxK: queries.
    k_BxHxLxK: keys.
    log_decay_BxHxL: g_t, log of the decay of the state before each token, not positive, (B or 1)×H×(L or 1) float32.
    share_BxHxL: factor of the values of each token, such as Δ, float32; None: 1.
    """

    q_BxHxLxK: jax.Array
    k_BxHxLxK: jax.Array
    log_decay_BxHxL: jax.Array
    share_BxHxL: jax.Array | None = None

    def values(self, v_BxHxLxE: jax.Array) -> jax.Array:
        """The values times the factor of each token."""
        if self.share_BxHxL is None:
            return v_BxHxLxE
        return (v_BxHxLxE.astype(jnp.float32) * self.share_BxHxL[..., None]).astype(v_BxHxLxE.dtype)


class DecayedCore(PlainCore):
    """Scalar decay: S_t = e^{g_t} S_{t−1} + k_tᵀ v_t, o_t = q_t S_t (see `ops.scalar_decay`); or both ways."""

    def __init__(self, chunk_size: int, kernels: str, *, shared_keys: bool = False):
        """A core without parameters; `kernels` is `model.kernels`; `shared_keys`: all heads share queries and keys."""
        self.chunk_size, self.kernels, self.shared_keys = chunk_size, kernels, shared_keys

    def __call__(self, by: DecayedInputs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        assert context.segments is not None
        size = min(self.chunk_size, v.shape[2])
        both_ways = None if context.causal else "the bidirectional form has no kernel"
        # A package computes all of it.
        g = jnp.broadcast_to(by.log_decay_BxHxL, v.shape[:3])
        inputs, runs_BxL = (by.q_BxHxLxK, by.k_BxHxLxK, g), context.segments.runs_BxL
        out = compute_by_package(self.kernels, "decayed_sums", inputs, by.values(v), runs_BxL, both_ways)
        if out is not None:
            return out
        # Our kernel computes causal pairs inside chunks; XLA carries the state across chunks.
        backend = choose_backend(self.kernels, "decayed sums", "identity", size, by.q_BxHxLxK, v, both_ways)
        return decayed_sums(
            by.q_BxHxLxK,
            by.k_BxHxLxK,
            by.values(v),
            by.log_decay_BxHxL,
            runs_BxL,
            chunk_size=self.chunk_size,
            causal=context.causal,
            kernel=Kernel(backend, context.key_span()) if backend else None,
        )

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """The state S before the first token, zeros, B×H×K×E float32; `capacity` is not used."""
        return jnp.zeros((batch, heads, key_width, value_width), jnp.float32)

    def prefill(
        self, by: DecayedInputs, v: jax.Array, context: Context, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Chunkwise form from any position: the state needs no chunk grid."""
        q, k, log_decay, _ = by
        return prefill_decayed(q, k, by.values(v), log_decay, state, context.real(), chunk_size=self.chunk_size)

    def step(self, by: DecayedInputs, v: jax.Array, context: Context, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Recurrent form: one product with the state."""
        # Sequences that have no token in this step keep their state.
        q, k, log_decay, _ = by
        out, after = step_decayed(q, k, by.values(v), log_decay, state)
        return out, jnp.where(context.real()[:, :, None, None], after, state)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Pairs inside the chunk, and two products with the state; bidirectional: states of both directions."""
        # Shared queries and keys need one score per pair for all heads.
        pairs, products = chunk_work(length, self.chunk_size)
        if not causal:
            pairs, products = 2 * pairs - length, 2 * products  # a token and itself are one pair
        of_pair = (1 if self.shared_keys else heads) * key_width + heads * value_width
        return 2 * (pairs * of_pair + products * heads * key_width * value_width) / length


def from_either_end(
    mix: Callable[[Any, jax.Array, jax.Array], jax.Array], by: Any, v_BxHxLxE: jax.Array, context: Context
) -> jax.Array:
    """Token mixing of a causal core; bidirectional: every second head reads the sequence from its end.

    Adjacent heads have opposite directions, so a mesh that shards the heads shards both directions evenly.

    Args:
        mix: the causal core: inputs, values and runs B×L -> B×H×L×E.
        by: a tree of arrays B×H×L×….
        v_BxHxLxE: values.
        context: of the sequences.
    """
    assert context.segments is not None
    runs_BxL = context.segments.runs_BxL
    if context.causal:
        return mix(by, v_BxHxLxE, runs_BxL)
    # Even heads read forward, odd heads backward; the outputs are interleaved again.
    pairs = jax.tree.map(lambda x: x.reshape(len(x), -1, 2, *x.shape[2:]), (by, v_BxHxLxE))
    by_even, v_even = jax.tree.map(lambda x: x[:, :, 0], pairs)
    by_odd, v_odd = jax.tree.map(lambda x: jnp.flip(x[:, :, 1], axis=2), pairs)
    after = jnp.flip(mix(by_odd, v_odd, jnp.flip(runs_BxL, axis=1)), axis=2)
    return jnp.stack([mix(by_even, v_even, runs_BxL), after], axis=2).reshape(v_BxHxLxE.shape)


def first_rates(heads: int, rngs: nnx.Rngs) -> jax.Array:
    """Initial log A of Mamba-2, per head: logarithms of uniform rates of decay."""
    return jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=_RATES[0], maxval=_RATES[1]))


def first_steps(heads: int, rngs: nnx.Rngs) -> jax.Array:
    """Initial bias of Δ of Mamba-2, per head: softplus of it is log-uniform."""
    # The inverse of softplus, so that softplus(bias) is the drawn step size.
    low, high = (math.log(step) for step in _STEPS)
    steps = jnp.exp(jax.random.uniform(rngs.params(), (heads,), minval=low, maxval=high))
    return steps + jnp.log(-jnp.expm1(-steps))
