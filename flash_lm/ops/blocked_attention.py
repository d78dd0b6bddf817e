"""Attention over all pairs of tokens, a block of queries and a block of keys at a time, and its derivative likewise.

Blocks that a causal query cannot see are left out. Softmax goes block by block as in "FlashAttention-2" (algorithms 1
and 2): forward it keeps a running maximum and total, backward it makes the weights again from the row's log of the sum.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.positions import toeplitz
from flash_lm.ops.products import matmul

SMALLEST, LARGEST = 128, 512  # tokens of a block
KEPT = "blocked_attention"  # name of what the derivative needs, for policies of jax.checkpoint

_HIDDEN = -1e30  # a score that has no weight, and is finite


class Side(NamedTuple):
    """Queries or keys: arrays over tokens, or over blocks of them along a first dimension."""

    x: jax.Array  # B×H×L×K
    index: Any  # in the row, (B or 1)×L; None in a gradient
    runs: Any  # see `Segments`, (B or 1)×L; None in a gradient


class Settings(NamedTuple):
    """What is known when a program is traced; see `quadratic_attention`."""

    causal: bool
    function: str
    scale: float


def block_size(length: int) -> int:
    """Tokens of a block: a quarter of the row, so that what a causal row computes in vain stays a part of it."""
    return min(LARGEST, max(SMALLEST, 1 << (length // 4 - 1).bit_length()))


def attend(
    queries: Side,
    keys: Side,
    v_BxHxMxE: jax.Array,
    divisor_BxL: jax.Array,
    settings: Settings,
    bias: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """As `quadratic_attention`, without an L×M array. Indices of both sides must count up by one.

    Returns:
        B×H×L×E, dtype of v.
    """
    length = queries.x.shape[2]
    size = block_size(length)
    reach = max(length, keys.x.shape[2]) + size  # padding stands further away
    bias_W = None if bias is None else bias(jnp.arange(1 - reach, reach, dtype=jnp.int32))
    queries, keys = (Side(*(_to_blocks(x, size, 0) for x in side)) for side in (queries, keys))
    # A divisor must not be zero, in the padding neither.
    arguments = (queries, keys, _to_blocks(v_BxHxMxE, size, 0), bias_W, _to_blocks(divisor_BxL, size, 1))
    out_GxBxHxCxE: Any = _attend(settings, *arguments)
    out_BxHxGxCxE = jnp.moveaxis(out_GxBxHxCxE, 0, 2)
    return out_BxHxGxCxE.reshape(*out_BxHxGxCxE.shape[:2], -1, out_BxHxGxCxE.shape[-1])[:, :, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings, queries, keys, v, bias, divisor) -> jax.Array:
    return _forward(settings, queries, keys, v, bias, divisor)[0]


def _forward(settings: Settings, queries: Side, keys: Side, v, bias, divisor):
    """The output, and what the derivative needs."""
    softmax = settings.function == "softmax"

    def of_queries(_, block):
        query, divisor_BxC, blocks = block
        shape = (*query.x.shape[:3], v.shape[-1])

        def add_softmax(j: jax.Array, carry):
            total_E, top, total = carry
            scores, visible = _scores(settings, query, _at(keys, j), bias)
            scores = jnp.where(visible, scores, _HIDDEN)
            higher = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights, shrink = jnp.where(visible, jnp.exp(scores - higher), 0), jnp.exp(top - higher)
            added = matmul(weights.astype(v.dtype), v[j])
            return total_E * shrink + added, higher, total * shrink + weights.sum(axis=-1, keepdims=True)

        def add(j: jax.Array, total_E: jax.Array) -> jax.Array:
            weights = _weights(settings, *_scores(settings, query, _at(keys, j), bias), divisor_BxC)
            return total_E + matmul(weights.astype(v.dtype), v[j])

        nothing = jnp.zeros(shape, jnp.float32)
        if not softmax:
            return None, (jax.lax.fori_loop(0, blocks, add, nothing).astype(v.dtype), divisor_BxC)
        start = (nothing, jnp.full((*shape[:3], 1), _HIDDEN), jnp.zeros((*shape[:3], 1)))
        total_E, top, total = jax.lax.fori_loop(0, blocks, add_softmax, start)
        total = jnp.where(total > 0, total, 1)  # of a query that sees nothing
        return None, ((total_E / total).astype(v.dtype), (top + jnp.log(total))[..., 0])

    _, (out, row) = jax.lax.scan(of_queries, None, (queries, divisor, _visible_blocks(settings, queries, keys)))
    out, row = (checkpoint_name(x, KEPT) for x in (out, row))
    return out, (queries, keys, v, bias, out, row)


def _backward(settings: Settings, kept, d_out: jax.Array):
    queries, keys, v, bias, out, row = kept

    def of_queries(carry, block):
        query, out_i, row_i, d_out_i, blocks = block
        # How the row's total shrinks the derivative; the other functions have no total.
        shared = (d_out_i.astype(jnp.float32) * out_i.astype(jnp.float32)).sum(axis=-1, keepdims=True)
        shared = shared if settings.function == "softmax" else 0

        def of_keys(j: jax.Array, carry):
            d_q, d_k_t, d_v_t, d_bias = carry
            key, v_j = _at(keys, j), v[j]
            scores, visible = _scores(settings, query, key, bias)
            weights, pull = jax.vjp(lambda s: _weights(settings, s, visible, row_i), scores)
            (d_scores,) = pull(matmul(d_out_i, v_j, transpose_b=True) - shared)
            d_v_t = d_v_t.at[j].add(matmul(d_out_t, weights.astype(d_out_i.dtype)))
            if bias is not None:
                _, pull = jax.vjp(lambda w: _bias_of_block(w, query, key), bias)
                d_bias += pull(d_scores.sum(axis=1) if key.index.shape[0] > 1 else d_scores.sum(axis=(0, 1))[None])[0]
            d_products = (d_scores * settings.scale).astype(key.x.dtype)
            d_k_t = d_k_t.at[j].add(matmul(query_t, d_products))
            return d_q + matmul(d_products, key.x), d_k_t, d_v_t, d_bias

        # XLA's CPU backend is slow at products with a transpose of the weights, so the sums are transposed instead.
        query_t, d_out_t = jax.lax.optimization_barrier((_transposed(query.x), _transposed(d_out_i)))
        d_q, *rest = jax.lax.fori_loop(0, blocks, of_keys, (jnp.zeros(query.x.shape, jnp.float32), *carry))
        return tuple(rest), d_q.astype(query.x.dtype)

    zeros = (jnp.zeros(_transposed(x).shape, jnp.float32) for x in (keys.x, v))
    start = (*zeros, None if bias is None else jnp.zeros_like(bias))
    blocks = _visible_blocks(settings, queries, keys)
    (d_k_t, d_v_t, d_bias), d_q = jax.lax.scan(of_queries, start, (queries, out, row, d_out, blocks))
    d_k, d_v = _transposed(d_k_t).astype(keys.x.dtype), _transposed(d_v_t).astype(v.dtype)
    return Side(d_q, None, None), Side(d_k, None, None), d_v, d_bias, None


_attend.defvjp(_forward, _backward)


def _scores(settings: Settings, query: Side, key: Side, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Of a block of queries and one of keys: B×H×C×C float32, and which pairs are visible, (B or 1)×1×C×C."""
    scores = matmul(query.x, key.x, transpose_b=True) * settings.scale
    if bias is not None:
        scores += _bias_of_block(bias, query, key)[:, None]
    runs = key.runs[:, None]
    visible = (query.runs[..., None] == runs) & (runs > 0)
    if settings.causal:
        visible &= key.index[:, None] <= query.index[..., None]
    return scores, visible[:, None]


def _bias_of_block(bias_W: jax.Array, query: Side, key: Side) -> jax.Array:
    """(B or 1)×C×C, from the bias of all distances."""
    size = query.index.shape[1]
    first_B = key.index[:, 0] - query.index[:, 0] - (size - 1) + bias_W.size // 2
    return toeplitz(bias_W[first_B[:, None] + jnp.arange(2 * size - 1, dtype=jnp.int32)[None]])


def _weights(settings: Settings, scores: jax.Array, visible: jax.Array, row: jax.Array) -> jax.Array:
    """From the scores and what is known of the row: softmax's log of the sum, B×H×C, or the divisor, (B or 1)×C."""
    if settings.function == "softmax":
        return jnp.where(visible, jnp.exp(jnp.where(visible, scores, _HIDDEN) - row[..., None]), 0)
    return ATTENTION_FUNCTIONS[settings.function](scores, visible, row[:, None, :, None])


def _visible_blocks(settings: Settings, queries: Side, keys: Side) -> jax.Array:
    """How many blocks of keys each block of queries looks at, from the first one on, G int32."""
    first_J, last_G = keys.index[:, :, 0].min(axis=1), queries.index.max(axis=(1, 2))
    seen_GxJ = first_J[None] <= last_G[:, None] if settings.causal else jnp.ones((last_G.size, first_J.size), bool)
    return seen_GxJ.sum(axis=1, dtype=jnp.int32)


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _at(side: Side, j: jax.Array) -> Side:
    return Side(*(x[j] for x in side))


def _to_blocks(x: jax.Array, size: int, padding: int) -> jax.Array:
    """B×L or B×H×L×K -> G×B×C or G×B×H×C×K."""
    axis = 1 if x.ndim == 2 else 2
    missing = -x.shape[axis] % size
    padded = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=padding)
    return jnp.moveaxis(padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)
