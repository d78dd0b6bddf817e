"""Cores of cross attention: softmax or GAU over a KV cache of the memory, and linear attention over its sum."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.layers.context import Memory
from flash_lm.layers.quadratic_core import QuadraticOptions
from flash_lm.layers.sublayer import State
from flash_lm.ops.linear_attention import append_ones, elu_plus_one, ratio
from flash_lm.ops.matmul import matmul
from flash_lm.ops.quadratic_attention import quadratic_attention
from flash_lm.ops.softmax_choice import softmax_by_library
from flash_lm.ops.visibility import KeySpan, MaskStructure


class CrossCore(Protocol):
    """The interface of the cores of cross attention: weighted sums of the values of a memory."""

    def __call__(self, q_BxHxLxK: jax.Array, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, memory: Memory) -> jax.Array:
        """B×H×L×E, from the part of the memory that each token sees."""
        ...

    def init_state(self, batch: int, heads: int, length: int, key_width: int, value_width: int) -> State:
        """The state before a memory of at most `length` tokens is read."""
        ...

    def hold(self, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, lengths_B: jax.Array, state: Any) -> State:
        """The state with this memory, of which the first `lengths_B` tokens per sequence are real."""
        ...

    def read(self, q_BxHxLxK: jax.Array, state: Any) -> jax.Array:
        """B×H×L×E, from the memory in the state."""
        ...

    def is_empty(self, state: Any) -> jax.Array:
        """Which sequences have no memory, B."""
        ...

    def flops_per_token(self, length: int, heads: int, key_width: int, value_width: int) -> float:
        """Model FLOPs per token for memories and sequences of `length` tokens."""
        ...


class HeldPairs(NamedTuple):
    """KV cache of a memory, and how many of its tokens are real."""

    key_BxHxMxK: jax.Array
    value_BxHxMxE: jax.Array
    lengths_B: jax.Array


class PairsCore(nnx.Module):
    """Attention over the memory: f(q kᵀ / √K) / N · v, where N is the length of the memory; softmax has no N."""

    def __init__(self, config: ModelConfig, options: QuadraticOptions, function: str):
        """`function`: a name of `ATTENTION_FUNCTIONS`."""
        self.function, self.state_dtype = function, jnp.dtype(config.state_dtype)
        self.implementation = options.implementation

    def __call__(self, q_BxHxLxK: jax.Array, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, memory: Memory) -> jax.Array:
        """See `CrossCore`."""
        return self._attend(q_BxHxLxK, k_BxHxMxK, v_BxHxMxE, memory.key_span(), memory.structure(), trains=True)

    def init_state(self, batch: int, heads: int, length: int, key_width: int, value_width: int) -> HeldPairs:
        """See `CrossCore`."""
        empty = lambda width: jnp.zeros((batch, heads, length, width), self.state_dtype)
        return HeldPairs(empty(key_width), empty(value_width), jnp.zeros(batch, jnp.int32))

    def hold(self, k_BxHxMxK, v_BxHxMxE, lengths_B: jax.Array, state: HeldPairs) -> HeldPairs:
        """See `CrossCore`."""
        put = lambda old, new: old.at[:, :, : new.shape[2]].set(new.astype(old.dtype))
        return HeldPairs(put(state.key_BxHxMxK, k_BxHxMxK), put(state.value_BxHxMxE, v_BxHxMxE), lengths_B)

    def read(self, q_BxHxLxK: jax.Array, state: HeldPairs) -> jax.Array:
        """See `CrossCore`."""
        # Every query sees all real tokens of the memory.
        stop_BxL = jnp.broadcast_to(state.lengths_B[:, None], (len(state.lengths_B), q_BxHxLxK.shape[2]))
        zeros_BxL = jnp.zeros_like(stop_BxL)
        q = q_BxHxLxK.astype(state.key_BxHxMxK.dtype)
        key_span = KeySpan(zeros_BxL, zeros_BxL, stop_BxL)
        structure = MaskStructure(causal=False, lengths=state.lengths_B)
        return self._attend(q, state.key_BxHxMxK, state.value_BxHxMxE, key_span, structure, trains=False).astype(
            q_BxHxLxK.dtype
        )

    def is_empty(self, state: HeldPairs) -> jax.Array:
        """See `CrossCore`."""
        return state.lengths_B == 0

    def flops_per_token(self, length: int, heads: int, key_width: int, value_width: int) -> float:
        """See `CrossCore`."""
        return 2 * heads * length * (key_width + value_width)

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, key_span: KeySpan, structure: MaskStructure, *, trains: bool
    ) -> jax.Array:
        # In blocks or by a library, so that memory does not grow with the product of both lengths.
        scale = q.shape[-1] ** -0.5
        if self.function == "softmax" and q.shape[2] > 1:
            by_library = softmax_by_library(
                self.implementation, q, k, v, key_span, structure, scale=scale, part="cross attention", trains=trains
            )
            if by_library is not None:
                return by_library
        return quadratic_attention(
            q,
            k,
            v,
            key_span,
            function=self.function,
            scale=scale,
            divisor_BxL=jnp.maximum(key_span.count(), 1).astype(jnp.float32),
            blocked=True,
        )


class SumsCore(nnx.Module):
    """Linear attention over the memory: φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k), φ = elu + 1.

    It is eq. 5 of "Transformers are RNNs" (Katharopoulos et al. 2020) for keys of another sequence.
    """

    def __call__(self, q_BxHxLxK: jax.Array, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, memory: Memory) -> jax.Array:
        """See `CrossCore`; packed sequences compute all pairs."""
        # A column of ones beside the values makes the denominator one more value.
        q, values = _features(q_BxHxLxK), append_ones(v_BxHxMxE.astype(jnp.float32))
        if memory.packed:
            key_span, k = memory.key_span(), _features(k_BxHxMxK)
            ones = jnp.ones(key_span.count().shape, jnp.float32)
            sums = quadratic_attention(q, k, values, key_span, function="identity", scale=1.0, divisor_BxL=ones)
            return ratio(sums).astype(v_BxHxMxE.dtype)
        return _read(q, _sums(k_BxHxMxK, values, memory.lengths_B), v_BxHxMxE.dtype)

    def init_state(self, batch: int, heads: int, length: int, key_width: int, value_width: int) -> jax.Array:
        """See `CrossCore`."""
        return jnp.zeros((batch, heads, key_width, value_width + 1), jnp.float32)

    def hold(self, k_BxHxMxK, v_BxHxMxE, lengths_B: jax.Array, state: jax.Array) -> jax.Array:
        """See `CrossCore`."""
        del state
        return _sums(k_BxHxMxK, append_ones(v_BxHxMxE.astype(jnp.float32)), lengths_B)

    def read(self, q_BxHxLxK: jax.Array, state: jax.Array) -> jax.Array:
        """See `CrossCore`."""
        return _read(_features(q_BxHxLxK), state, q_BxHxLxK.dtype)

    def is_empty(self, state: jax.Array) -> jax.Array:
        """See `CrossCore`; features are positive, and so are their sums."""
        return (state[..., -1] == 0).all(axis=(1, 2))

    def flops_per_token(self, length: int, heads: int, key_width: int, value_width: int) -> float:
        """See `CrossCore`: a product per token of the memory and of the sequence; the denominator is one more value."""
        return 4 * heads * key_width * (value_width + 1)


def _features(x: jax.Array) -> jax.Array:
    return elu_plus_one(x.astype(jnp.float32))


def _sums(k_BxHxMxK: jax.Array, values: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Σ φ(k) [v, 1]ᵀ over the real tokens of each memory, B×H×K×(E+1) float32."""
    real_BxM = jnp.arange(k_BxHxMxK.shape[2], dtype=jnp.int32)[None] < lengths_B[:, None]
    return matmul(jnp.where(real_BxM[:, None, :, None], _features(k_BxHxMxK), 0), values, transpose_a=True)


def _read(q: jax.Array, sums: jax.Array, dtype: Any) -> jax.Array:
    return ratio(matmul(q, sums)).astype(dtype)
