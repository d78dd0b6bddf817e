"""LSH attention ("Reformer", Kitaev et al. 2020, section 2), with windows of ranks within buckets.

In each round of hashing a token has a bucket, and its rank is the number of earlier tokens of its document and bucket.
It sees the tokens of its bucket whose ranks differ by less than a window. So its keys depend on its document alone,
and in a causal model only on the tokens before it. The published form cuts the sorted sequence into chunks, whose
borders depend on how many tokens, also later ones and those of other documents, have lower hashes.

Sorted by document and bucket, equal hashes are neighbours, so a window is a span of the sorted row: chunks of one
window each see themselves and their neighbours, and time and memory grow with the tokens times the window.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.banded_softmax import merge_softmaxes, softmax_of_scores
from flash_lm.ops.matmul import matmul

SELF = -1e5  # score of a token with itself, as published: its weight is 0, unless it sees nothing else
_NOWHERE = -(2**30)  # sort index of padding


class Sorted(NamedTuple):
    """The tokens by bucket in each round; arrays are B×H×R×L int32.

    order_BxHxRxL: the tokens in the order of their documents and buckets, and of their positions inside a bucket.
    inverse_BxHxRxL: where each token is in that order.
    ranks_BxHxRxL: number of earlier tokens of the same document and bucket.
    places_BxHxRxL: numbers that differ by less than the window where documents and buckets are the same and the ranks
        differ by less than the window, and nowhere else; negative for padding.
    """

    order_BxHxRxL: jax.Array
    inverse_BxHxRxL: jax.Array
    ranks_BxHxRxL: jax.Array
    places_BxHxRxL: jax.Array


def unit(x_BxHxLxK: jax.Array) -> jax.Array:
    """Unit vectors x / ‖x‖; 0 for 0, with a gradient of 0."""
    x = x_BxHxLxK.astype(jnp.float32)
    square = jnp.square(x).sum(axis=-1, keepdims=True)
    return jnp.where(square > 0, x * jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0).astype(x_BxHxLxK.dtype)


def hash_buckets(x_BxHxLxK: jax.Array, rotations_RxKxF: jax.Array) -> jax.Array:
    """LSH buckets argmax [x R; −x R] of each round: B×H×R×L int32 below 2F, the same for x of any length.

    In float32 at the highest precision, so that training, prefill and step agree.
    """
    x, rotations = (array.astype(jnp.float32) for array in (x_BxHxLxK, rotations_RxKxF))
    projected = jnp.einsum("bhlk,rkf->bhrlf", x, rotations, precision=jax.lax.Precision.HIGHEST)
    return jnp.argmax(jnp.concatenate([projected, -projected], axis=-1), axis=-1).astype(jnp.int32)


def sorted_by_bucket(buckets_BxHxRxL: jax.Array, runs_BxL: jax.Array, count: int, window: int) -> Sorted:
    """Sorts the tokens of each sequence by document and bucket.

    Args:
        buckets_BxHxRxL: bucket of each token in each round.
        runs_BxL: document of each token, 0 = padding, (B or 1)×L.
        count: number of buckets.
        window: as for `lsh_attention`.
    """
    length = buckets_BxHxRxL.shape[-1]
    runs = runs_BxL[:, None, None]
    # One sort key per document and bucket; a stable sort keeps the order of positions.
    codes = jnp.where(runs > 0, runs * count + buckets_BxHxRxL, 0)
    order = jnp.argsort(codes, axis=-1, stable=True).astype(jnp.int32)
    inverse = jnp.argsort(order, axis=-1).astype(jnp.int32)
    by_code = _along(codes, order)
    is_first = jnp.pad(by_code[..., 1:] != by_code[..., :-1], [(0, 0)] * 3 + [(1, 0)], constant_values=True)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), codes.shape)
    # Ranks count within a bucket; places add a gap of one window between buckets.
    ranks = index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=3)
    places = index + min(window, length) * jnp.cumsum(is_first, axis=-1, dtype=jnp.int32)
    places = jnp.where(by_code > 0, places, _NOWHERE)
    return Sorted(order, inverse, _along(ranks, inverse), _along(places, inverse))


def lsh_attention(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    by_bucket: Sorted,
    *,
    window: int,
    causal: bool,
) -> jax.Array:
    """LSH attention: softmax(q kᵀ) v over the tokens that each token sees in any round, B×H×L×E; zeros for padding.

    Rounds are merged by the logs of their sums (online softmax), and a pair that N rounds see has its score less log N
    in each of them, so that it counts once ("Multi-round LSH attention"). A token sees itself only if it sees nothing
    else.

    Args:
        q_BxHxLxK: queries.
        k_BxHxLxK: keys, unit vectors.
        v_BxHxLxE: values.
        by_bucket: from `sorted_by_bucket`, with the same window.
        window: ranks of tokens that see each other differ by less.
        causal: only tokens up to the query.
    """
    parts = []
    for number in range(by_bucket.order_BxHxRxL.shape[2]):
        # Each round sorts, attends and restores the order.
        order, inverse = by_bucket.order_BxHxRxL[:, :, number], by_bucket.inverse_BxHxRxL[:, :, number]
        q, k, v = (permute(x, order, inverse) for x in (q_BxHxLxK, k_BxHxLxK, v_BxHxLxE))
        places = _along(by_bucket.places_BxHxRxL, order[:, :, None])
        part = _round(q, k, v, places, number, min(window, order.shape[-1]), causal)
        parts.append(jax.tree.map(lambda x, i=inverse, o=order: permute(x, i, o), part))
    return merge_softmaxes(parts)


def places_seen(query_place_BxHxR: jax.Array, places_BxHxMxR: jax.Array, window: int) -> jax.Array:
    """Visible tokens up to the query in any round, B×H×M, by places as in `Sorted`."""
    back_BxHxMxR = query_place_BxHxR[:, :, None] - places_BxHxMxR
    return ((back_BxHxMxR >= 0) & (back_BxHxMxR < window)).any(axis=-1)


def _round(q, k, v, places_BxHxRxL, number: int, window: int, causal: bool):
    """One round on sorted tokens: a `SoftmaxPart`, sorted as well."""
    # Sorted by bucket, a chunk of one window sees itself and its neighbours.
    length = v.shape[2]
    chunks = -(-length // window)
    offsets = (0,) if chunks == 1 else (-1, 0) if causal else (-1, 0, 1)
    query_BxHxRxGxC = _split_chunks(places_BxHxRxL, 3, window, _NOWHERE)
    near_BxHxRxGxM = _append_neighbours(query_BxHxRxGxC, 3, offsets, _NOWHERE)

    def pairs(number: int) -> tuple[jax.Array, jax.Array]:
        return query_BxHxRxGxC[:, :, number, ..., None], near_BxHxRxGxM[:, :, number, :, None]

    def seen(number: int) -> jax.Array:
        query, key = pairs(number)
        back = query - key
        return (query >= 0) & (back < window) & (back > (-1 if causal else -window))

    # One by one and not along an axis, over which XLA's CPU backend sums on one core.
    rounds_BxHxGxCxM = sum(seen(i).astype(jnp.int32) for i in range(places_BxHxRxL.shape[2]))
    # Scores of the pairs of neighbouring chunks, less log N for pairs that N rounds see.
    near_k, near_v = (_append_neighbours(_split_chunks(x, 2, window, 0), 2, offsets, 0) for x in (k, v))
    scores = matmul(_split_chunks(q, 2, window, 0), near_k, transpose_b=True)
    # log N as a sum of log (n / (n − 1)) up to N, since a selection is faster than a logarithm for each pair.
    for n in range(2, places_BxHxRxL.shape[2] + 1):
        scores = scores - jnp.where(rounds_BxHxGxCxM >= n, math.log(n / (n - 1)), 0.0)
    query, key = pairs(number)
    part = softmax_of_scores(jnp.where(query == key, SELF, scores), seen(number), near_v)
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :length], part)


def _split_chunks(x: jax.Array, axis: int, size: int, fill: int) -> jax.Array:
    """The axis as chunks of `size`, the last one filled up."""
    padded = jnp.pad(x, [(0, -x.shape[i] % size if i == axis else 0) for i in range(x.ndim)], constant_values=fill)
    return padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _append_neighbours(x: jax.Array, axis: int, offsets: tuple[int, ...], fill: int) -> jax.Array:
    """Each chunk with the chunks at these offsets; fill beyond the ends."""
    count = x.shape[axis]
    parts = []
    for offset in offsets:
        widths = [(max(-offset, 0), max(offset, 0)) if i == axis else (0, 0) for i in range(x.ndim)]
        start = max(offset, 0)
        parts.append(jax.lax.slice_in_dim(jnp.pad(x, widths, constant_values=fill), start, start + count, axis=axis))
    return jnp.concatenate(parts, axis=axis + 1)


def _along(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, index, axis=-1)


@jax.custom_vjp
def permute(x_BxHxLx: jax.Array, order_BxHxL: jax.Array, inverse_BxHxL: jax.Array) -> jax.Array:
    """Permutes x along L: B×H×L or B×H×L×K. Its gradient is gathered, too, where JAX would scatter it."""
    del inverse_BxHxL
    index = order_BxHxL.reshape(*order_BxHxL.shape, *[1] * (x_BxHxLx.ndim - 3))
    return jnp.take_along_axis(x_BxHxLx, index, axis=2)


def _permuted_forward(x, order, inverse):
    return permute(x, order, inverse), (order, inverse)


def _permuted_backward(orders, gradient):
    order, inverse = orders
    return permute(gradient, inverse, order), None, None


permute.defvjp(_permuted_forward, _permuted_backward)
