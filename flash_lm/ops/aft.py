"""Attention-free transformer: Σ exp(K + w) ⊙ V / Σ exp(K + w) ("An Attention Free Transformer", Zhai 2021, eq. 2).

There is a key per channel, so a softmax over a query's keys cannot be a matrix product of exp(K) unless a maximum is
subtracted first. In a rectangle of pairs, exp(w)·(exp(K) ⊙ V) is a matrix product with the maxima of the rectangle (see
`ops.logsumexp_means`). If all keys and w are moderate, products need no maximum (see `ops.aft_products`).

Heads are those of AFT-conv, whose keys have width M = 1, shared by all E channels of the head; in other forms there
is one head and M = E.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flash_lm.ops.aft_bias import PairBias
from flash_lm.ops.aft_products import causal_products, fits
from flash_lm.ops.logsumexp_means import (
    NOTHING,
    Sums,
    add,
    add_to_blocks,
    exponentials,
    mean_by_either,
    nothing,
    only,
    sum_over_blocks,
    without_max,
)
from flash_lm.ops.matmul import matmul
from flash_lm.ops.rectangles import Rectangles, carry_over_blocks, crossing, last_run_mask, neighbours

_SMALL = 8  # with this many keys or more, a matrix product is faster than a sum of products
_SIMPLE_BLOCK = 64  # tokens in a block without position bias w
QUERY_BLOCK = 256  # queries of a large rectangle that are processed together


def self_sums(k: jax.Array, v: jax.Array, w: jax.Array | float, visible: jax.Array) -> Sums:
    """Online-softmax sums over a single key per query.

    Args:
        k: (…, M) float32.
        v: (…, E) float32.
        w: (…, 1), added to the keys.
        visible: (…, 1).
    """
    shifted = jnp.where(visible, k + w, NOTHING)
    top = jax.lax.stop_gradient(shifted)
    weight = jnp.where(visible, jnp.exp(shifted - top), 0)
    return Sums(weight * v, weight, top)


def key_sums(k: jax.Array, v: jax.Array, visible: jax.Array) -> Sums:
    """Online-softmax sums over the keys of axis −2, which becomes 1; w is zero.

    Args:
        k: (…, L, M) float32.
        v: (…, L, E) float32.
        visible: (…, L, 1).
    """
    weight, top = exponentials(k, visible)
    total = lambda x: x.sum(axis=-2, keepdims=True)
    return Sums(total(weight * v), total(weight), top)


def rectangle_sums(
    k: jax.Array, v: jax.Array, visible_keys: jax.Array, bias: PairBias | None, where: Rectangles
) -> Sums:
    """Online-softmax sums of each query over all visible keys of its rectangle.

    Args:
        k: B×H×L×M float32.
        v: B×H×L×E float32.
        visible_keys: (B or 1)×G×C: keys of the rectangle that all its queries see.
        bias: w of the pairs; None: zero.
        where: the rectangles.

    Returns:
        B×H×G×C×…, or ×1×… without a bias, because the sums are then the same for all queries.
    """
    visible = visible_keys[:, None, :, :, None]
    k, v = where.keys(k, 2), where.keys(v, 2)
    if bias is None:
        return key_sums(k, v, visible)
    # exp(K) relative to the maximum over the keys of the rectangle.
    weight, top = exponentials(k, visible)
    weighted = weight * v
    visible_row = visible_keys[:, None, :, None, :]

    # exp(w) relative to the maximum over the keys of each query; both maxima add up in the result.
    def look(queries: Callable[[jax.Array, int], jax.Array]) -> Sums:
        w = jnp.where(visible_row, bias.tile(Rectangles(where.keys, queries)), NOTHING)
        top_w = jax.lax.stop_gradient(w.max(axis=-1, keepdims=True))
        a = jnp.where(visible_row, jnp.exp(w - top_w), 0)
        return Sums(_mix(a, weighted), _mix(a, weight), top + top_w)

    # Many queries go in blocks, so that exp(w) of a large rectangle never exists at once.
    queries = where.queries(bias.query_index_BxL, 1).shape[-1]
    if queries <= QUERY_BLOCK:
        return look(where.queries)

    def part(start: jax.Array) -> Sums:
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(where.queries(x, axis), start, QUERY_BLOCK, axis + 1)
        return look(cut)

    parts = jax.lax.map(jax.checkpoint(part), jnp.arange(0, queries, QUERY_BLOCK))
    return Sums(*(jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], queries, x.shape[-1]) for x in parts))


def _mix(a: jax.Array, x: jax.Array) -> jax.Array:
    """The product over the keys; elementwise for so few keys that a call would be slower."""
    if a.shape[-1] < _SMALL:
        # Not a sum over an axis, which XLA's CPU backend turns into a scalar loop.
        terms = [a[..., i : i + 1] * x[..., i : i + 1, :] for i in range(a.shape[-1])]
        return functools.reduce(jnp.add, terms)
    leading = jnp.broadcast_shapes(a.shape[:-2], x.shape[:-2])
    return matmul(*(jnp.broadcast_to(y, (*leading, *y.shape[-2:])) for y in (a, x)))


def aft(
    k_BxHxLxM: jax.Array,
    v_BxHxLxE: jax.Array,
    runs_BxL: jax.Array,
    bias: PairBias | None,
    *,
    causal: bool,
    packed: bool = True,
) -> jax.Array:
    """AFT: Σ exp(K + w) ⊙ V / Σ exp(K + w) over the keys of the query's document; if causal, none after the query.

    Args:
        k_BxHxLxM: keys, M = E or 1.
        v_BxHxLxE: values.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        bias: w; None: zero (AFT-simple).
        causal: hide keys after the query.
        packed: a sequence may hold several documents.

    Returns:
        B×H×L×E, dtype of v. Padding gets zeros.
    """
    real = (runs_BxL > 0)[:, None, :, None]

    def both_ways(sums_of: Callable, add: Callable, k: jax.Array, runs: jax.Array, v: jax.Array, bias: PairBias | None):
        # Bidirectional: the tokens after each one are those before it in the reversed sequence.
        sums = sums_of(k, v, runs, bias)
        if causal:
            return sums
        backwards = bias.over_tokens(lambda x: jnp.flip(x, 1)) if bias is not None else None
        later = sums_of(jnp.flip(k, 2), jnp.flip(v, 2), jnp.flip(runs, 1), backwards, include_self=False)
        return add(sums, jax.tree.map(lambda x: jnp.flip(x, 2), later))

    def stable_form(k: jax.Array, v: jax.Array, bias: PairBias | None) -> tuple[jax.Array, jax.Array]:
        return without_max(both_ways(causal_sums, add, k, runs_BxL, v, bias))

    def product_form(k: jax.Array, v: jax.Array, bias: PairBias | None) -> tuple[jax.Array, jax.Array]:
        # Padding has no weight, so all rows of one document have the same pairs.
        runs = runs_BxL if packed else jnp.ones_like(runs_BxL[:1])
        of_both = lambda a, b: jax.tree.map(jnp.add, a, b)
        k, v = jnp.where(real, k, NOTHING), jnp.where(real, v, 0)
        numerator, denominator = both_ways(causal_products, of_both, k, runs, v, bias)
        return jnp.where(real, numerator, 0), jnp.where(real, denominator, 1)

    # Padding must not decide between the two forms.
    def moderate(k: jax.Array, v: jax.Array, bias: PairBias | None) -> jax.Array:
        return fits(jnp.where(real, k, 0), jnp.where(real, v, 0), bias)

    k, v = (x.astype(jnp.float32) for x in (k_BxHxLxM, v_BxHxLxE))
    return mean_by_either(moderate, product_form, stable_form, k, v, bias).astype(v_BxHxLxE.dtype)


def causal_sums(
    k: jax.Array,
    v: jax.Array,
    runs_BxL: jax.Array,
    bias: PairBias | None,
    *,
    include_self: bool = True,
    initial: Sums | None = None,
) -> Sums:
    """Online-softmax sums of each token over the visible keys up to itself.

    Args:
        k: B×H×L×M float32.
        v: B×H×L×E float32.
        runs_BxL: run of each token, (B or 1)×L.
        bias: w of all pairs.
        include_self: whether a token sees itself.
        initial: sums with w = 0 over keys before the sequence, which belong to its run 1; B×H×1×….
    """
    length = k.shape[2]
    block = _block(bias, length)
    pad = lambda x, axis: jnp.pad(x, [(0, -length % block if i == axis else 0) for i in range(x.ndim)])
    # Pad to full blocks; padding is in no run.
    k, v, runs = pad(k, 2), pad(v, 2), pad(runs_BxL, 1)
    bias = bias.over_tokens(lambda x: pad(x, 1)) if bias is not None else None
    w = 0.0 if bias is None else bias.diagonal()
    # Every token with itself, then divide and conquer inside its block.
    sums = self_sums(k, v, w, (runs > 0)[:, None, :, None]) if include_self else nothing(v, k.shape[-1])
    look = lambda where: _across(k, v, runs, bias, where)
    sums = sum_over_blocks(sums, block, look)
    # Windows reach into the block before; older tokens have w = 0 and enter as one sum.
    if bias is not None and bias.window is not None and block < k.shape[2]:
        sums = add_to_blocks(sums, look(neighbours(block)))
    if block < k.shape[2] or initial is not None:
        sums = add_to_blocks(sums, _far(k, v, runs, block, 1 if bias is None else 2, initial))
    return jax.tree.map(lambda x: x[:, :, :length], sums)


def _block(bias: PairBias | None, length: int) -> int:
    """Size of the blocks in which pairs are computed one by one: a power of two, no smaller than the window."""
    least = _SIMPLE_BLOCK if bias is None else bias.window
    return 1 << (max(min(least or length, length), 1) - 1).bit_length()


def _across(k: jax.Array, v: jax.Array, runs: jax.Array, bias: PairBias | None, where: Rectangles) -> Sums:
    """Rectangles, each for the one document that crosses from its keys to its queries."""
    visible_keys, visible_queries = crossing(runs, where)
    return only(rectangle_sums(k, v, visible_keys, bias, where), visible_queries)


def _far(k: jax.Array, v: jax.Array, runs: jax.Array, size: int, back: int, initial: Sums | None) -> Sums:
    """Sums with w = 0 over the document of each query, in the blocks `back` or more before its block."""
    blocks = neighbours(size).queries
    runs_BxGxC = blocks(runs, 1)
    block_sums = key_sums(blocks(k, 2), blocks(v, 2), last_run_mask(runs_BxGxC)[:, None, :, :, None])
    far, visible = carry_over_blocks(block_sums, runs_BxGxC, add, nothing(v[:, :, :1], k.shape[-1]), initial, back)
    return only(far, visible)
