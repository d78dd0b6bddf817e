"""Decoding of AFT: a KV cache of the tokens that still have a w, and online-softmax sums over older ones."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.aft import QUERY_BLOCK, causal_sums, key_sums, rectangle_sums
from flash_lm.ops.aft_bias import PairBias
from flash_lm.ops.kv_cache import write
from flash_lm.ops.logsumexp_means import Sums, add, nothing, ratio
from flash_lm.ops.rectangles import Rectangles

# (positions of the queries, positions of the keys, each B×L) -> w; None: zero
BiasOf = Callable[[jax.Array, jax.Array], PairBias | None]


class WindowState(NamedTuple):
    """Decode state of a window: its size is constant.

    key_BxHxWxM, value_BxHxWxE: keys and values of the last W tokens, oldest first, W = window − 1; float32.
    far: sums over all older tokens.
    """

    key_BxHxWxM: jax.Array
    value_BxHxWxE: jax.Array
    far: Sums


class FullState(NamedTuple):
    """KV cache of AFT-full: keys and values of all tokens so far, at their positions, float32."""

    key_BxHxMxM: jax.Array
    value_BxHxMxE: jax.Array


def init_window(batch: int, heads: int, kept: int, key_width: int, value_width: int) -> WindowState:
    """The state before the first token; `kept`: W."""
    key, value = (jnp.zeros((batch, heads, kept, width), jnp.float32) for width in (key_width, value_width))
    one = jnp.zeros((batch, heads, 1, value_width), jnp.float32)
    return WindowState(key, value, nothing(one, key_width))


def prefill_window(
    k: jax.Array, v: jax.Array, state: WindowState, start_B: jax.Array, lengths_B: jax.Array, bias_of: BiasOf
) -> tuple[jax.Array, WindowState]:
    """Consumes lengths[b] tokens of each sequence.

    Args:
        k: B×H×L×M float32.
        v: B×H×L×E float32.
        state: state before these tokens.
        start_B: position of the first new token of each sequence.
        lengths_B: number of new tokens, 0 … L.
        bias_of: makes w for the old and new tokens, B×(W + L) positions.

    Returns:
        B×H×L×E float32, and the state after the new tokens.
    """
    length, kept = k.shape[2], state.key_BxHxWxM.shape[2]
    index_1xT = jnp.arange(kept + length, dtype=jnp.int32)[None]
    # The cached tokens, then the new ones; positions below 0 are slots without a token.
    position_BxT = start_B[:, None] - kept + index_1xT
    real_BxT = (position_BxT >= 0) & (index_1xT < kept + lengths_B[:, None])

    def append(old: jax.Array, new: jax.Array) -> jax.Array:
        # Beyond the last position padding may be NaN, and zero times NaN is NaN.
        return jnp.where(real_BxT[:, None, :, None], jnp.concatenate([old, new], axis=2), 0)

    key, value = append(state.key_BxHxWxM, k), append(state.value_BxHxWxE, v)
    # One token is a single rectangle; several are the parallel form, with the older tokens as its initial sums.
    bias = bias_of(position_BxT, position_BxT)
    if length == 1 and bias is not None:
        newest = lambda x, axis: jnp.expand_dims(jax.lax.slice_in_dim(x, kept, kept + 1, axis=axis), axis)
        window_sums = rectangle_sums(key, value, real_BxT[:, None], bias, Rectangles(_one_rectangle, newest))
        out = ratio(add(jax.tree.map(lambda x: x[:, :, 0], window_sums), state.far))
    else:
        runs_BxT = real_BxT.astype(jnp.int32)
        sums = causal_sums(key, value, runs_BxT, bias, initial=state.far)
        out = ratio(jax.tree.map(lambda x: x[:, :, kept:], sums))
    # Tokens that leave the window lose their w and enter the sums of older tokens.
    leaving_BxT = real_BxT & (index_1xT < lengths_B[:, None])
    far = add(state.far, key_sums(key, value, leaving_BxT[:, None, :, None]))
    stays_BxW = lengths_B[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
    newest_of = lambda x: jnp.take_along_axis(x, stays_BxW[:, None, :, None], axis=2)
    return out, WindowState(newest_of(key), newest_of(value), far)


def prefill_full(
    k: jax.Array, v: jax.Array, state: FullState, start_B: jax.Array, lengths_B: jax.Array, bias_of: BiasOf
) -> tuple[jax.Array, FullState]:
    """`prefill_window` for AFT-full, where all pairs have a w: new tokens see the cache and each other."""
    batch, _, length = k.shape[:3]
    capacity = state.key_BxHxMxM.shape[2]
    index_1xL, slot_1xM = (jnp.arange(n, dtype=jnp.int32)[None] for n in (length, capacity))
    position_BxL, real_BxL = start_B[:, None] + index_1xL, index_1xL < lengths_B[:, None]
    k, v = (jnp.where(real_BxL[:, None, :, None], x, 0) for x in (k, v))
    slots_BxM = jnp.broadcast_to(slot_1xM, (batch, capacity))
    # Many queries are processed in full blocks.
    missing = -length % QUERY_BLOCK if length > QUERY_BLOCK else 0
    queries_BxL = jnp.pad(position_BxL, ((0, 0), (0, missing)))
    # New tokens see the whole cache, which is one rectangle.
    old = rectangle_sums(
        state.key_BxHxMxM,
        state.value_BxHxMxE,
        (slots_BxM < start_B[:, None])[:, None],
        bias_of(queries_BxL, slots_BxM),
        Rectangles(_one_rectangle, _one_rectangle),
    )
    # New tokens see each other in the parallel form.
    new = causal_sums(k, v, real_BxL.astype(jnp.int32), bias_of(position_BxL, position_BxL))
    out = ratio(add(jax.tree.map(lambda x: x[:, :, 0, :length], old), new))
    slot_BxL = jnp.where(real_BxL, position_BxL, capacity)  # padding is out of range and is dropped
    return out, FullState(write(state.key_BxHxMxM, k, slot_BxL), write(state.value_BxHxMxE, v, slot_BxL))


def _one_rectangle(x: jax.Array, axis: int) -> jax.Array:
    """All tokens as one rectangle."""
    return jnp.expand_dims(x, axis)
