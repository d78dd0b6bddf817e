"""Attention over all pairs of tokens, one block of queries and keys at a time; so is its derivative.

Blocks outside the range that the queries see are skipped. Softmax goes block by block as in "FlashAttention-2"
(algorithms 1 and 2): the forward pass keeps a running maximum and total, and the backward pass recomputes the weights
from the row's log of the sum.
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
from flash_lm.ops.sight import Sight

SMALLEST, LARGEST = 128, 512  # tokens in a block
KEPT = "blocked_attention"  # name of the derivative's residuals, for policies of jax.checkpoint

# Scores of hidden pairs: finite. And the initial running maximum: lower than any score, but so far above hidden scores
# that the exponential of the difference is zero, so weights need no mask of their own.
_HIDDEN, _LOWEST = -1e30, -1e29


class Settings(NamedTuple):
    """What is known at tracing time; see `quadratic_attention`."""

    function: str
    scale: float


def block_size(length: int) -> int:
    """Tokens in a block: a quarter of the row, so that the wasted work of a causal row stays a constant share."""
    return min(LARGEST, max(SMALLEST, 1 << (length // 4 - 1).bit_length()))


def attend(
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    sight: Sight,
    divisor_BxL: jax.Array,
    settings: Settings,
    bias: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """As `quadratic_attention`, without an L×M array. Places of adjacent queries must differ by one.

    Returns:
        B×H×L×E, dtype of v.
    """
    length = q_BxHxLxK.shape[2]
    size = block_size(length)
    reach = max(length, k_BxHxMxK.shape[2]) + size  # padding is further away
    bias_W = None if bias is None else bias(jnp.arange(1 - reach, reach, dtype=jnp.int32))
    q, k, v = (_to_blocks(x, size, 0) for x in (q_BxHxLxK, k_BxHxMxK, v_BxHxMxE))
    about = Sight(*(_to_blocks(x, size, 0) for x in sight))
    # A divisor must not be zero, even at padding.
    out_GxBxHxCxE: Any = _attend(settings, q, k, v, bias_W, about, _to_blocks(divisor_BxL, size, 1))
    out_BxHxGxCxE = jnp.moveaxis(out_GxBxHxCxE, 0, 2)
    return out_BxHxGxCxE.reshape(*out_BxHxGxCxE.shape[:2], -1, out_BxHxGxCxE.shape[-1])[:, :, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings, q, k, v, bias, sight, divisor) -> jax.Array:
    return _forward(settings, q, k, v, bias, sight, divisor)[0]


def _forward(settings: Settings, q, k, v, bias, sight: Sight, divisor):
    """The output, and the residuals of the derivative."""
    softmax = settings.function == "softmax"

    def of_queries(_, block):
        query, divisor_BxC, seen, blocks = block
        shape = (*query.shape[:3], v.shape[-1])

        def add_softmax(j: jax.Array, carry):
            total_E, top, total = carry
            scores, visible = _scores(settings, query, k[j], j, seen, bias)
            scores = jnp.where(visible, scores, _HIDDEN)
            higher = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - higher), jnp.exp(top - higher)
            added = matmul(weights.astype(v.dtype), v[j])
            return total_E * shrink + added, higher, total * shrink + weights.sum(axis=-1, keepdims=True)

        def add(j: jax.Array, total_E: jax.Array) -> jax.Array:
            weights = _weights(settings, *_scores(settings, query, k[j], j, seen, bias), divisor_BxC)
            return total_E + matmul(weights.astype(v.dtype), v[j])

        nothing = jnp.zeros(shape, jnp.float32)
        if not softmax:
            return None, (jax.lax.fori_loop(blocks[0], blocks[1], add, nothing).astype(v.dtype), divisor_BxC)
        start = (nothing, jnp.full((*shape[:3], 1), _LOWEST), jnp.zeros((*shape[:3], 1)))
        total_E, top, total = jax.lax.fori_loop(blocks[0], blocks[1], add_softmax, start)
        total = jnp.where(total > 0, total, 1)  # for a query that sees nothing
        return None, ((total_E / total).astype(v.dtype), (top + jnp.log(total))[..., 0])

    _, (out, row) = jax.lax.scan(of_queries, None, (q, divisor, sight, _blocks_seen(sight)))
    out, row = (checkpoint_name(x, KEPT) for x in (out, row))
    return out, (q, k, v, bias, sight, out, row)


def _backward(settings: Settings, kept, d_out: jax.Array):
    q, k, v, bias, sight, out, row = kept

    def of_queries(carry, block):
        query, out_i, row_i, d_out_i, seen, blocks = block
        # Softmax's normalisation reduces the derivative; the other functions have none.
        shared = (d_out_i.astype(jnp.float32) * out_i.astype(jnp.float32)).sum(axis=-1, keepdims=True)
        shared = shared if settings.function == "softmax" else 0

        def of_keys(j: jax.Array, carry):
            d_q, d_k_t, d_v_t, d_bias = carry
            key, v_j = k[j], v[j]
            scores, visible = _scores(settings, query, key, j, seen, bias)
            weights, pull = jax.vjp(lambda s: _weights(settings, s, visible, row_i), scores)
            (d_scores,) = pull(matmul(d_out_i, v_j, transpose_b=True) - shared)
            d_v_t = d_v_t.at[j].add(matmul(d_out_t, weights.astype(d_out_i.dtype)))
            if bias is not None:
                places = seen.index_BxL
                _, pull = jax.vjp(lambda w: _bias_of_block(w, places, j), bias)
                d_bias += pull(d_scores.sum(axis=1) if places.shape[0] > 1 else d_scores.sum(axis=(0, 1))[None])[0]
            d_products = (d_scores * settings.scale).astype(key.dtype)
            d_k_t = d_k_t.at[j].add(matmul(query_t, d_products))
            return d_q + matmul(d_products, key), d_k_t, d_v_t, d_bias

        # XLA's CPU backend is slow at products with transposed weights, so the sums are transposed instead.
        query_t, d_out_t = jax.lax.optimization_barrier((_transposed(query), _transposed(d_out_i)))
        d_q, *rest = jax.lax.fori_loop(blocks[0], blocks[1], of_keys, (jnp.zeros(query.shape, jnp.float32), *carry))
        return tuple(rest), d_q.astype(query.dtype)

    zeros = (jnp.zeros(_transposed(x).shape, jnp.float32) for x in (k, v))
    start = (*zeros, None if bias is None else jnp.zeros_like(bias))
    (d_k_t, d_v_t, d_bias), d_q = jax.lax.scan(of_queries, start, (q, out, row, d_out, sight, _blocks_seen(sight)))
    d_k, d_v = _transposed(d_k_t).astype(k.dtype), _transposed(d_v_t).astype(v.dtype)
    return d_q, d_k, d_v, d_bias, None, None


_attend.defvjp(_forward, _backward)


def _scores(
    settings: Settings, query: jax.Array, key: jax.Array, j: jax.Array, seen: Sight, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """For a block of queries and the j-th of keys: B×H×C×C float32, and which pairs are visible, (B or 1)×1×C×C."""
    scores = matmul(query, key, transpose_b=True) * settings.scale
    if bias is not None:
        scores += _bias_of_block(bias, seen.index_BxL, j)[:, None]
    size = key.shape[2]
    return scores, seen.visible(j * size + jnp.arange(size, dtype=jnp.int32))[:, None]


def _bias_of_block(bias_W: jax.Array, places_BxC: jax.Array, j: jax.Array) -> jax.Array:
    """(B or 1)×C×C, from the bias by distance, for queries at these places and the j-th block of keys."""
    size = places_BxC.shape[1]
    first_B = j * size - places_BxC[:, 0] - (size - 1) + bias_W.size // 2
    return toeplitz(bias_W[first_B[:, None] + jnp.arange(2 * size - 1, dtype=jnp.int32)[None]])


def _weights(settings: Settings, scores: jax.Array, visible: jax.Array, row: jax.Array) -> jax.Array:
    """The weights, from the scores and a value a row: softmax's log of the sum, B×H×C, or the divisor, (B or 1)×C."""
    if settings.function == "softmax":
        return jnp.exp(jnp.where(visible, scores, _HIDDEN) - row[..., None])
    return ATTENTION_FUNCTIONS[settings.function](scores, visible, row[:, None, :, None])


def _blocks_seen(sight: Sight) -> tuple[jax.Array, jax.Array]:
    """The first block of keys that each block of queries sees, and the one after the last, G int32 each."""
    size, sees = sight.index_BxL.shape[-1], sight.count() > 0
    first_G = jnp.where(sees, sight.first_BxL, jnp.iinfo(jnp.int32).max).min(axis=(1, 2))
    stop_G = jnp.where(sees, sight.stop_BxL, 0).max(axis=(1, 2))
    return first_G // size, -(-stop_G // size)


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _to_blocks(x: jax.Array, size: int, padding: int) -> jax.Array:
    """B×L or B×H×L×K -> G×B×C or G×B×H×C×K."""
    axis = 1 if x.ndim == 2 else 2
    missing = -x.shape[axis] % size
    padded = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=padding)
    return jnp.moveaxis(padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)
