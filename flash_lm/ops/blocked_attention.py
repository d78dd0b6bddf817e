"""Blocked quadratic attention with online softmax (FlashAttention): one block of queries and keys at a time.

Blocks outside the range that the queries see are skipped. Online softmax as in "FlashAttention-2"
(algorithms 1 and 2): the forward pass keeps a running maximum and total, and the backward pass recomputes the weights
from the log of the sum per query.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.matmul import matmul
from flash_lm.ops.positions import toeplitz
from flash_lm.ops.visibility import KeySpan

SMALLEST, LARGEST = 128, 512  # tokens in a block
_MOST_BIASES = 1 << 25  # numbers in the bias of all pairs of blocks
KEPT = "blocked_attention"  # name of the derivative's residuals, for policies of jax.checkpoint

# Scores of hidden pairs: finite. And the initial running maximum: lower than any score, but so far above hidden scores
# that the exponential of the difference is zero, so weights need no mask.
HIDDEN, LOWEST = -1e30, -1e29


class Settings(NamedTuple):
    """Static settings; see `quadratic_attention`."""

    function: str
    scale: float


def block_size(length: int, window: int | None = None) -> int:
    """Tokens in a block: a quarter of the sequence, so that the wasted work of the causal mask stays a constant share.

    If queries see only a window, a block is no longer than that (or the smallest), because it is visited in full.
    """
    wanted = length // 4 if window is None else min(length // 4, window)
    return min(LARGEST, max(SMALLEST, 1 << max(wanted - 1, 0).bit_length()))


def attend(
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    key_span: KeySpan,
    divisor_BxL: jax.Array,
    settings: Settings,
    bias: Callable[[jax.Array], jax.Array] | None,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`quadratic_attention` without an L×M array. With a bias, indices of adjacent queries must differ by one.

    Args:
        q_BxHxLxK: queries.
        k_BxHxMxK: keys, at indices 0 … M − 1.
        v_BxHxMxE: values.
        key_span: keys that each query sees; time grows with the blocks from the first to the last key of each block.
        divisor_BxL: N of each query.
        settings: function and scale.
        bias: by the distance from query to key; see `bias_of_heads`.
        window: about as many keys as a query sees, for the size of blocks; None: all.

    Returns:
        The output, B×H×L×E, dtype of v. And, of softmax, the logarithm of each query's sum of exponentials, B×H×L
        float32, hugely negative where nothing is visible.
    """
    length = q_BxHxLxK.shape[2]
    size = block_size(length, window)
    distances = (
        None if bias is None else _distances(bias, key_span, size, -(-length // size), -(-k_BxHxMxK.shape[2] // size))
    )
    q, k, v = (_to_blocks(x, size, 0) for x in (q_BxHxLxK, k_BxHxMxK, v_BxHxMxE))
    about = KeySpan(*(_to_blocks(x, size, 0) for x in key_span))
    # A divisor must not be zero, even at padding.
    blocked: Any = _attend(settings, q, k, v, distances, about, _to_blocks(divisor_BxL, size, 1))
    out, log_sum = (_from_blocks(x, length) for x in blocked)
    return out, log_sum


def bias_of_heads(bias: Callable[[jax.Array], jax.Array], distance: jax.Array) -> jax.Array:
    """The bias of each head at these distances, with (H or 1) in front.

    Args:
        bias: returns float32 of the shape of its argument, for all heads, or with H in front; at a distance whose bias
            is −1e30 or lower, a key is hidden.
        distance: index of the key minus index of the query, int32.
    """
    values = bias(distance)
    return values[None] if values.ndim == distance.ndim else values


class Distances(NamedTuple):
    """The bias of pairs of blocks, by their distance.

    bias: D×H×C×C of each distance between two blocks, the same for all sequences; or H×W by the distance of two tokens,
        if that were too large, or if sequences differ in how their queries lie between the blocks of keys.
    lowest: the least distance from the first query of a block to the first key of one, int32.
    """

    bias: jax.Array
    lowest: jax.Array

    def block_bias(self, places_BxC: jax.Array, j: jax.Array) -> jax.Array:
        """(B or 1)×(H or 1)×C×C, for queries at these indices and the j-th block of keys."""
        size = places_BxC.shape[1]
        if self.bias.ndim == 4:
            return self.bias[self._index(places_BxC, j)][None]
        first_B = j * size - places_BxC[:, 0] - (size - 1) + self.bias.shape[1] // 2
        diagonals_HxBxN = self.bias[:, first_B[:, None] + jnp.arange(2 * size - 1, dtype=jnp.int32)[None]]
        return toeplitz(jnp.swapaxes(diagonals_HxBxN, 0, 1))

    def add_bias_gradient(
        self, total: jax.Array, places_BxC: jax.Array, j: jax.Array, d_scores: jax.Array
    ) -> jax.Array:
        """The sum of the bias's derivatives with that of one block added, whose scores have these derivatives."""
        if self.bias.ndim == 4:
            # As a product, since XLA's CPU backend sums over rows on one core.
            one_a_bias = d_scores.reshape(-1, math.prod(self.bias.shape[1:]))
            ones = jnp.ones((1, len(one_a_bias)), jnp.float32)
            summed = jnp.matmul(ones, one_a_bias, precision=jax.lax.Precision.HIGHEST)
            index = self._index(places_BxC, j)
            added = total[index] + summed.reshape(self.bias.shape[1:])
            return jax.lax.dynamic_update_index_in_dim(total, added, index, 0)
        alike = tuple(i for i, x in enumerate((places_BxC, self.bias)) if x.shape[0] == 1)  # rows, heads
        _, pull = jax.vjp(lambda bias: self._replace(bias=bias).block_bias(places_BxC, j), self.bias)
        return total + pull(d_scores.sum(axis=alike, keepdims=True))[0]

    def _index(self, places_BxC: jax.Array, j: jax.Array) -> jax.Array:
        size = places_BxC.shape[1]
        return (j * size - places_BxC[0, 0] - self.lowest) // size


def _distances(
    bias: Callable[[jax.Array], jax.Array], key_span: KeySpan, size: int, queries: int, keys: int
) -> Distances:
    """The bias for these numbers of blocks."""
    lowest = -(queries - 1) * size - key_span.index_BxL[0, 0]
    blocks = queries + keys - 1
    by_block = bias_of_heads(bias, lowest - (size - 1) + jnp.arange((blocks + 1) * size - 1, dtype=jnp.int32))
    if key_span.index_BxL.shape[0] == 1 and len(by_block) * blocks * size**2 <= _MOST_BIASES:
        starts_D = size * jnp.arange(blocks, dtype=jnp.int32)
        diagonals_HxDxN = by_block[:, starts_D[:, None] + jnp.arange(2 * size - 1, dtype=jnp.int32)[None]]
        return Distances(toeplitz(jnp.swapaxes(diagonals_HxDxN, 0, 1)), lowest)
    reach = max(queries, keys) * size + size  # padding is further away
    return Distances(bias_of_heads(bias, jnp.arange(1 - reach, reach, dtype=jnp.int32)), lowest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings, q, k, v, bias, key_span, divisor) -> tuple[jax.Array, jax.Array]:
    return _forward(settings, q, k, v, bias, key_span, divisor)[0]


def _forward(settings: Settings, q, k, v, bias, key_span: KeySpan, divisor):
    """The output and softmax's log of the sum (else the divisor); and the residuals of the derivative."""
    # Outer scan over blocks of queries, inner loop over the blocks of keys that they see.
    softmax = settings.function == "softmax"

    def visit_queries(_, block):
        query, divisor_BxC, seen, blocks = block
        shape = (*query.shape[:3], v.shape[-1])

        def add_softmax(j: jax.Array, carry):
            # Online softmax: rescale the running output and total to the new maximum.
            total_E, top, total = carry
            scores, visible = _scores(settings, query, k[j], j, seen, bias)
            scores = jnp.where(visible, scores, HIDDEN)
            higher = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - higher), jnp.exp(top - higher)
            added = matmul(weights.astype(v.dtype), v[j])
            return total_E * shrink + added, higher, total * shrink + weights.sum(axis=-1, keepdims=True)

        def add(j: jax.Array, total_E: jax.Array) -> jax.Array:
            # Elementwise functions need no normalisation across blocks.
            weights = _weights(settings, *_scores(settings, query, k[j], j, seen, bias), divisor_BxC)
            return total_E + matmul(weights.astype(v.dtype), v[j])

        nothing = jnp.zeros(shape, jnp.float32)
        if not softmax:
            return None, (jax.lax.fori_loop(blocks[0], blocks[1], add, nothing).astype(v.dtype), divisor_BxC)
        # A query without visible keys keeps total 0 and gets output 0.
        start = (nothing, jnp.full((*shape[:3], 1), LOWEST), jnp.zeros((*shape[:3], 1)))
        total_E, top, total = jax.lax.fori_loop(blocks[0], blocks[1], add_softmax, start)
        total = jnp.where(total > 0, total, 1)  # for a query that sees nothing
        return None, ((total_E / total).astype(v.dtype), (top + jnp.log(total))[..., 0])

    # Besides its inputs, the backward pass gets the output and a number per query.
    _, (out, row) = jax.lax.scan(visit_queries, None, (q, divisor, key_span, blocks_seen(key_span)))
    out, row = (checkpoint_name(x, KEPT) for x in (out, row))
    return (out, row), (q, k, v, bias, key_span, out, row)


def _backward(settings: Settings, kept, d_outputs: tuple[jax.Array, jax.Array]):
    q, k, v, bias, key_span, out, row = kept
    d_out, d_row = d_outputs

    def visit_queries(carry, block):
        query, out_i, row_i, d_out_i, d_row_i, seen, blocks = block
        shared = 0  # softmax's normalisation reduces the derivative, and its log-sum adds to it; others have neither
        if settings.function == "softmax":
            shared = (d_out_i.astype(jnp.float32) * out_i.astype(jnp.float32)).sum(axis=-1, keepdims=True)
            shared -= d_row_i[..., None]

        def visit_keys(j: jax.Array, carry):
            # Recompute the weights of this block pair, and accumulate dv, dk and dq (FlashAttention-2, algorithm 2).
            d_q, d_k_t, d_v_t, d_bias = carry
            key, v_j = k[j], v[j]
            scores, visible = _scores(settings, query, key, j, seen, bias)
            weights, pull = jax.vjp(lambda s: _weights(settings, s, visible, row_i), scores)
            (d_scores,) = pull(matmul(d_out_i, v_j, transpose_b=True) - shared)
            d_v_t = d_v_t.at[j].add(matmul(d_out_t, weights.astype(d_out_i.dtype)))
            if bias is not None:
                d_bias = bias.add_bias_gradient(d_bias, seen.index_BxL, j, d_scores)
            d_products = (d_scores * settings.scale).astype(key.dtype)
            d_k_t = d_k_t.at[j].add(matmul(query_t, d_products))
            return d_q + matmul(d_products, key), d_k_t, d_v_t, d_bias

        # XLA's CPU backend is slow at products with transposed weights, so the sums are transposed instead.
        query_t, d_out_t = jax.lax.optimization_barrier((_transpose(query), _transpose(d_out_i)))
        d_q, *rest = jax.lax.fori_loop(blocks[0], blocks[1], visit_keys, (jnp.zeros(query.shape, jnp.float32), *carry))
        return tuple(rest), d_q.astype(query.dtype)

    # dk and dv are carried over all blocks of queries; dq is complete after its block.
    zeros = (jnp.zeros(_transpose(x).shape, jnp.float32) for x in (k, v))
    start = (*zeros, None if bias is None else jnp.zeros_like(bias.bias))
    (d_k_t, d_v_t, d_bias), d_q = jax.lax.scan(
        visit_queries, start, (q, out, row, d_out, d_row, key_span, blocks_seen(key_span))
    )
    d_k, d_v = _transpose(d_k_t).astype(k.dtype), _transpose(d_v_t).astype(v.dtype)
    d_distances = None if bias is None else bias._replace(bias=d_bias, lowest=None)
    return d_q, d_k, d_v, d_distances, None, None


_attend.defvjp(_forward, _backward)


def _scores(
    settings: Settings, query: jax.Array, key: jax.Array, j: jax.Array, seen: KeySpan, bias: Distances | None
) -> tuple[jax.Array, jax.Array]:
    """For a block of queries and the j-th of keys: B×H×C×C float32, and which pairs are visible, (B or 1)×1×C×C."""
    scores = matmul(query, key, transpose_b=True) * settings.scale
    if bias is not None:
        scores += bias.block_bias(seen.index_BxL, j)
    size = key.shape[2]
    return scores, seen.visible(j * size + jnp.arange(size, dtype=jnp.int32))[:, None]


def _weights(settings: Settings, scores: jax.Array, visible: jax.Array, row: jax.Array) -> jax.Array:
    """The weights, from scores and a value per query: softmax's log of the sum, B×H×C, or the divisor, (B or 1)×C."""
    if settings.function == "softmax":
        return jnp.exp(jnp.where(visible, scores, HIDDEN) - row[..., None])
    return ATTENTION_FUNCTIONS[settings.function](scores, visible, row[:, None, :, None])


def blocks_seen(key_span: KeySpan) -> tuple[jax.Array, jax.Array]:
    """The first block of keys that each block of queries sees, and the one after the last, G int32 each."""
    size, sees = key_span.index_BxL.shape[-1], key_span.count() > 0
    first_G = jnp.where(sees, key_span.first_BxL, jnp.iinfo(jnp.int32).max).min(axis=(1, 2))
    stop_G = jnp.where(sees, key_span.stop_BxL, 0).max(axis=(1, 2))
    return first_G // size, -(-stop_G // size)


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _to_blocks(x: jax.Array, size: int, padding: int) -> jax.Array:
    """B×L or B×H×L×K -> G×B×C or G×B×H×C×K."""
    axis = 1 if x.ndim == 2 else 2
    missing = -x.shape[axis] % size
    padded = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=padding)
    return jnp.moveaxis(padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _from_blocks(x: jax.Array, length: int) -> jax.Array:
    """G×B×H×C… -> B×H×L…; what has no heads keeps one dimension less."""
    axis = min(x.ndim - 2, 2)
    joined = jnp.moveaxis(x, 0, axis)
    shape = (*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined.reshape(shape), 0, length, axis=axis)
