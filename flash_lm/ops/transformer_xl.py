"""Transformer-XL attention: segment-level recurrence and relative positions ("Transformer-XL", sections 3.2, 3.3).

A sequence is cut into segments of C tokens. The scores are (q_i + u)·k_j + (q_i + v)·W_r R_(i−j), where R are sinusoids
of the distance. Heads are in the batch dimension N = B·H where arrays have chunks.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.banded_softmax import softmax_of_scores
from flash_lm.ops.chunk_grid import ChunkGrid
from flash_lm.ops.chunks import to_chunks
from flash_lm.ops.kv_cache import Ring, positions_in, write_token
from flash_lm.ops.matmul import matmul
from flash_lm.ops.mixed_chunk_attention import heads_into_batch, local_attention
from flash_lm.ops.positions import sinusoid, skew
from flash_lm.ops.visibility import KeySpan, is_between

BACK = (-1, 0)  # the segments that a causal query sees, relative to that of the query
AROUND = (-1, 0, 1)


class SegmentInputs(NamedTuple):
    """Queries, keys and W_r of Transformer-XL attention.

    content_BxHxLxK: queries of the content term, q + u.
    position_BxHxLxK: queries of the position term, q + v.
    k_BxHxLxK: keys.
    memory_k_BxHxLxK: the keys as later segments see them: equal, but their derivative may end at the weights.
    kernel_DxHxK: W_r.
    """

    content_BxHxLxK: jax.Array
    position_BxHxLxK: jax.Array
    k_BxHxLxK: jax.Array
    memory_k_BxHxLxK: jax.Array
    kernel_DxHxK: jax.Array


class Values(NamedTuple):
    """The values, and the same as later segments see them, B×H×L×E each."""

    current: jax.Array
    memory: jax.Array


def attend_segments(
    by: SegmentInputs, v: Values, key_span: KeySpan, *, segment: int, reach: tuple[int, ...]
) -> jax.Array:
    """Attention of all tokens to their segment and the neighbouring ones, parallel form.

    Args:
        by: queries, keys and W_r.
        v: values.
        key_span: keys that each query sees, in the full sequence.
        segment: C.
        reach: `BACK` or `AROUND`.

    Returns:
        B×H×L×E, dtype of v.
    """
    q = by.content_BxHxLxK
    size = min(segment, q.shape[2])
    out_NxLxE = local_attention(
        heads_into_batch(q),
        heads_into_batch(by.k_BxHxLxK),
        heads_into_batch(v.current),
        key_span,
        chunk_size=size,
        function="softmax",
        scale=1 / math.sqrt(q.shape[-1]),
        divisor_BxL=jnp.ones((1, q.shape[2]), jnp.float32),
        reach=reach,
        neighbours=(heads_into_batch(by.memory_k_BxHxLxK), heads_into_batch(v.memory)),
        added_NxGxCxM=_position_scores(by.position_BxHxLxK, by.kernel_DxHxK, size, reach),
    )
    return out_NxLxE.reshape(v.current.shape)


def prefill_segments(
    by: SegmentInputs, v: Values, ring: Ring, start_B: jax.Array, lengths_B: jax.Array, *, segment: int
) -> tuple[jax.Array, Ring]:
    """`attend_segments` for sequences that continue from anywhere in a segment.

    Args:
        by: of the new tokens; those at lengths[b] and after are ignored.
        v: their values.
        ring: keys and values of the current segment and of the one before, 2C.
        start_B: position of the first new token of each sequence.
        lengths_B: number of new tokens, 0 … L.
        segment: C.

    Returns:
        B×H×L×E, and the ring after the new tokens.
    """
    # Align the ring and the new tokens with segments; then it is the parallel form.
    grid = ChunkGrid(segment, len(BACK), by.k_BxHxLxK.shape[2], start_B, lengths_B)
    k, memory_k = (grid.put_after(ring.key_BxHxRxK, x) for x in (by.k_BxHxLxK, by.memory_k_BxHxLxK))
    current, memory = (grid.put_after(ring.value_BxHxRxE, x) for x in v)
    on_grid = SegmentInputs(grid.put(by.content_BxHxLxK), grid.put(by.position_BxHxLxK), k, memory_k, by.kernel_DxHxK)
    out_BxHxTxE = attend_segments(on_grid, Values(current, memory), grid.key_span(), segment=segment, reach=BACK)
    kept = (grid.take_last(new, old.dtype) for new, old in zip((k, current), ring, strict=True))
    return grid.take(out_BxHxTxE), Ring(*kept)


def step_segments(
    by: SegmentInputs, v_BxHx1xE: jax.Array, ring: Ring, position_B: jax.Array, real_B: jax.Array, *, segment: int
) -> tuple[jax.Array, Ring]:
    """Recurrent form, one token per sequence, L = 1: B×H×1×E, and the ring; unreal sequences keep theirs."""
    # Write the token to the ring; content scores against all slots.
    ring = write_token(ring, by.k_BxHxLxK, v_BxHx1xE, position_B, real_B)
    slot_position_BxR, now_Bx1 = positions_in(ring, position_B), position_B[:, None]
    first_Bx1 = jnp.maximum(now_Bx1 - now_Bx1 % segment - segment, 0)
    q = by.content_BxHxLxK.astype(ring.key_BxHxRxK.dtype)
    scores_BxHx1xR = matmul(q, ring.key_BxHxRxK, transpose_b=True)
    # One query is turned into what all distances are multiplied with, which is less than to map all distances.
    turned_BxHxD = jnp.einsum("bhk,dhk->bhd", by.position_BxHxLxK[:, :, 0], by.kernel_DxHxK)
    r_RxD = sinusoid(jnp.arange(ring.size, dtype=jnp.int32), turned_BxHxD.shape[-1]).astype(turned_BxHxD.dtype)
    by_distance_BxHxR = jnp.einsum("bhd,rd->bhr", turned_BxHxD, r_RxD, preferred_element_type=jnp.float32)
    of_slots_BxHxR = jnp.take_along_axis(by_distance_BxHxR, (now_Bx1 - slot_position_BxR)[:, None], axis=2)
    scores_BxHx1xR = (scores_BxHx1xR + of_slots_BxHxR[:, :, None]) / math.sqrt(q.shape[-1])
    # Only the current segment and the one before are visible.
    visible_BxR = is_between(first_Bx1, slot_position_BxR, now_Bx1 + 1)
    out_BxHx1xE, _ = softmax_of_scores(scores_BxHx1xR, visible_BxR[:, None, None], ring.value_BxHxRxE)
    return out_BxHx1xE.astype(v_BxHx1xE.dtype), ring


def _position_scores(q_BxHxLxK: jax.Array, kernel_DxHxK: jax.Array, size: int, reach: tuple[int, ...]) -> jax.Array:
    """q_i · W_r R_(i−j) / √K for each query and the keys that it reaches, N×G×C×(R·C) float32.

    By all distances first, and then moved to the columns of the keys: no sinusoid for each pair.
    """
    batch, heads, _, width = q_BxHxLxK.shape
    dim = kernel_DxHxK.shape[0]
    keys = len(reach) * size
    back_W = (1 - min(reach)) * size - jnp.arange(keys + size, dtype=jnp.int32)
    # Relative positions: W_r R for every distance, shared by all queries.
    r_WxHxK = sinusoid(back_W, dim).astype(q_BxHxLxK.dtype) @ kernel_DxHxK.reshape(dim, -1)
    r_HxWxK = jnp.moveaxis(r_WxHxK.reshape(-1, heads, width), 1, 0)
    r_NxWxK = jnp.broadcast_to(r_HxWxK[None], (batch, *r_HxWxK.shape)).reshape(-1, *r_HxWxK.shape[1:])
    q_NxGxCxK = to_chunks(heads_into_batch(q_BxHxLxK), size)
    folded_NxMxK = q_NxGxCxK.reshape(batch * heads, -1, width)
    scores_NxMxW = matmul(folded_NxMxK, r_NxWxK, transpose_b=True) / math.sqrt(width)
    return skew(scores_NxMxW.reshape(*q_NxGxCxK.shape[:3], -1), keys)
