"""Mixed chunk attention: local quadratic plus global linear attention (FLASH, Hua et al. 2022, section 3.2).

Quadratic attention inside each chunk and linear attention over the chunks are separate functions; a layer adds them.
The chunk grid starts with the sequence. Heads are in the batch dimension N = B·H, while what queries see and
`runs_BxL` have B rows.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.chunks import from_chunks, sums_before, to_chunks
from flash_lm.ops.matmul import matmul
from flash_lm.ops.segments import Segments
from flash_lm.ops.visibility import KeySpan, document_key_span


def heads_into_batch(x_BxHx: jax.Array) -> jax.Array:
    """B×H×… -> N×…, N = B·H."""
    return x_BxHx.reshape(-1, *x_BxHx.shape[2:])


def local_attention(
    q_NxLxK: jax.Array,
    k_NxLxK: jax.Array,
    v_NxLxE: jax.Array,
    key_span: KeySpan,
    *,
    chunk_size: int,
    function: str,
    scale: float,
    divisor_BxL: jax.Array,
    bias_CxRxC: jax.Array | None = None,
    reach: tuple[int, ...] = (0,),
    neighbours: tuple[jax.Array, jax.Array] | None = None,
    added_NxGxCxM: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Local attention f(scale · q kᵀ + b) / N · v within the chunk of the query, or also in neighbouring chunks.

    Args:
        q_NxLxK: queries.
        k_NxLxK: keys.
        v_NxLxE: values.
        key_span: keys that each query sees, in the full sequence.
        chunk_size: C.
        function: a name of `ATTENTION_FUNCTIONS`.
        scale: factor of q kᵀ.
        divisor_BxL: N of each query, (B or 1)×L float32, not zero.
        bias_CxRxC: added to the scores: [i, r, j] for query i of a chunk and key j of the chunk reach[r].
        reach: the R chunks that a query sees, relative to its chunk.
        neighbours: keys and values as other chunks see them; None: the same.
        added_NxGxCxM: also added to the scores, M = R·C.
        dtype: of the result; None: that of v.

    Returns:
        N×L×E.
    """
    length, chunk_size = q_NxLxK.shape[1], min(chunk_size, q_NxLxK.shape[1])
    q_NxGxCxK, k_NxGxCxK, v_NxGxCxE = (to_chunks(x, chunk_size) for x in (q_NxLxK, k_NxLxK, v_NxLxE))
    # Keys and values of the chunks in reach, R chunks side by side.
    of_others = (k_NxGxCxK, v_NxGxCxE) if neighbours is None else (to_chunks(x, chunk_size) for x in neighbours)
    both = zip((k_NxGxCxK, v_NxGxCxE), of_others, strict=True)
    k_NxGxMxK, v_NxGxMxE = (_append_neighbours(same, others, reach) for same, others in both)
    # Scores are float32, unless they are the weights, which are rounded anyway.
    scores_dtype = v_NxLxE.dtype if function == "identity" else jnp.float32
    scores_NxGxCxM = matmul(q_NxGxCxK, k_NxGxMxK, transpose_b=True, dtype=scores_dtype) * scale
    if bias_CxRxC is not None:
        scores_NxGxCxM += bias_CxRxC[:chunk_size, :, :chunk_size].reshape(1, 1, chunk_size, -1)
    if added_NxGxCxM is not None:
        scores_NxGxCxM += added_NxGxCxM
    # Mask and divisor of each query, relative to its chunk.
    seen = KeySpan(*(to_chunks(x_BxL, chunk_size) for x_BxL in key_span.clip_to_chunks(chunk_size, reach)))
    visible_BxGxCxM = seen.visible(jnp.arange(min(reach) * chunk_size, (max(reach) + 1) * chunk_size, dtype=jnp.int32))
    divisor_BxGxC = to_chunks(divisor_BxL, chunk_size)
    # The padding of the last chunk sees nothing, but its divisor would be 0.
    divisor_BxGxCx1 = jnp.where(divisor_BxGxC > 0, divisor_BxGxC, 1)[..., None]
    visible_NxGxCxM, divisor_NxGxCx1 = (repeat_for_heads(x, q_NxLxK) for x in (visible_BxGxCxM, divisor_BxGxCx1))
    weights_NxGxCxM = ATTENTION_FUNCTIONS[function](scores_NxGxCxM, visible_NxGxCxM, divisor_NxGxCx1)
    out_NxGxCxE = matmul(weights_NxGxCxM.astype(v_NxLxE.dtype), v_NxGxMxE, dtype=dtype or v_NxLxE.dtype)
    return from_chunks(out_NxGxCxE, length)


def _append_neighbours(x_NxGxCx: jax.Array, others_NxGxCx: jax.Array, reach: tuple[int, ...]) -> jax.Array:
    """N×G×(R·C)×…: each chunk with its neighbours of `reach`, zeros outside the sequence."""
    if reach == (0,):
        return x_NxGxCx
    chunks, rest = x_NxGxCx.shape[1], [(0, 0)] * (x_NxGxCx.ndim - 2)
    padded = jnp.pad(others_NxGxCx, [(0, 0), (1, 1), *rest])
    return jnp.concatenate([padded[:, 1 + n : 1 + n + chunks] if n else x_NxGxCx for n in reach], axis=2)


def global_attention(
    q_NxLxK: jax.Array,
    k_NxLxK: jax.Array,
    v_NxLxE: jax.Array,
    runs_BxL: jax.Array,
    *,
    chunk_size: int,
    weight_BxL: jax.Array,
    initial_NxKxE: jax.Array | None = None,
    sums_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal global attention q · Σ kᵀv / N over earlier chunks of the query's document.

    Args:
        q_NxLxK: queries.
        k_NxLxK: keys.
        v_NxLxE: values.
        runs_BxL: number of the contiguous document segment of each token (see `Segments`), (B or 1)×L.
        chunk_size: C.
        weight_BxL: 1 / N of each query, (B or 1)×L float32; zero if its document has no earlier chunk.
        initial_NxKxE: Σ kᵀv of the chunks before, if the first document of the sequence continues from there.
        sums_dtype: of the sum of each chunk, and of the result of adding them in float32; None: that of v.
        dtype: of the result; None: that of v.

    Returns:
        N×L×E; and the sum that enters each chunk, N×G×K×E.
    """
    q_NxGxCxK = to_chunks(q_NxLxK * repeat_for_heads(weight_BxL, q_NxLxK)[..., None].astype(q_NxLxK.dtype), chunk_size)
    entering_NxGxKxE = _entering_sums(
        k_NxLxK, v_NxLxE, runs_BxL, chunk_size, initial_NxKxE, sums_dtype or v_NxLxE.dtype
    )
    out_NxGxCxE = matmul(q_NxGxCxK, entering_NxGxKxE.astype(v_NxLxE.dtype), dtype=dtype or v_NxLxE.dtype)
    return from_chunks(out_NxGxCxE, q_NxLxK.shape[1]), entering_NxGxKxE


def global_attention_both_ways(
    q_NxLxK: jax.Array,
    k_NxLxK: jax.Array,
    v_NxLxE: jax.Array,
    runs_BxL: jax.Array,
    *,
    weight_BxL: jax.Array,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Bidirectional global attention q · Σ kᵀv / N, one document per sequence, perhaps padded.

    Args:
        q_NxLxK: queries.
        k_NxLxK: keys.
        v_NxLxE: values.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L; one run per sequence.
        weight_BxL: 1 / N of each query, (B or 1)×L float32.
        dtype: of the result; None: that of v.

    Returns:
        N×L×E. Padding gets zeros.
    """
    real_BxL = runs_BxL > 0
    real_k_NxLxK = jnp.where(repeat_for_heads(real_BxL, k_NxLxK)[..., None], k_NxLxK, 0)
    sum_NxKxE = matmul(real_k_NxLxK, v_NxLxE, transpose_a=True, dtype=v_NxLxE.dtype)
    weight_BxL = jnp.where(real_BxL, weight_BxL, 0)
    weighted_NxLxK = q_NxLxK * repeat_for_heads(weight_BxL, q_NxLxK)[..., None].astype(q_NxLxK.dtype)
    return matmul(weighted_NxLxK, sum_NxKxE, dtype=dtype or v_NxLxE.dtype)


def global_attention_in_segments(
    q_NxLxK: jax.Array,
    k_NxLxK: jax.Array,
    v_NxLxE: jax.Array,
    segments: Segments,
    *,
    chunk_size: int,
    weight_BxL: jax.Array,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Bidirectional global attention q · Σ kᵀv / N over the query's document in a packed sequence.

    The sum has three parts: the chunks before that of the query, those after it, and that chunk.

    Args:
        q_NxLxK: queries.
        k_NxLxK: keys.
        v_NxLxE: values.
        segments: the documents of each sequence.
        chunk_size: C.
        weight_BxL: 1 / N of each query, (B or 1)×L float32.
        dtype: of the result; None: that of v.

    Returns:
        N×L×E.
    """
    length, runs_BxL, key_span = q_NxLxK.shape[1], segments.runs_BxL, document_key_span(segments, causal=False)
    missing = -length % chunk_size

    def rotate(x: jax.Array) -> jax.Array:
        """Reversing preserves the chunk grid only if the last chunk is full."""
        return jnp.flip(jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), axis=1)

    # Earlier chunks forward, later chunks by the same function on the reversed sequence.
    before_BxL = jnp.where(key_span.before_chunk(chunk_size) > 0, weight_BxL, 0)
    after_BxL = jnp.where(key_span.after_chunk(chunk_size) > 0, weight_BxL, 0)
    sums = {"chunk_size": chunk_size, "dtype": dtype}
    out, _ = global_attention(q_NxLxK, k_NxLxK, v_NxLxE, runs_BxL, weight_BxL=before_BxL, **sums)
    *arrays, after_BxL = (rotate(x) for x in (q_NxLxK, k_NxLxK, v_NxLxE, runs_BxL, after_BxL))
    out_after, _ = global_attention(*arrays, weight_BxL=after_BxL, **sums)
    # Inside the chunk, linear attention is local attention with the identity.
    out_inside = local_attention(
        q_NxLxK * repeat_for_heads(weight_BxL, q_NxLxK)[..., None].astype(q_NxLxK.dtype),
        k_NxLxK,
        v_NxLxE,
        key_span,
        chunk_size=chunk_size,
        function="identity",
        scale=1.0,
        divisor_BxL=jnp.ones_like(weight_BxL),
        dtype=dtype,
    )
    return out + jnp.flip(out_after, axis=1)[:, :length] + out_inside


def _entering_sums(
    k_NxLxK: jax.Array,
    v_NxLxE: jax.Array,
    runs_BxL: jax.Array,
    chunk_size: int,
    initial_NxKxE: jax.Array | None,
    dtype: DTypeLike,
) -> jax.Array:
    """Σ kᵀv over the earlier chunks of the document that crosses into each chunk, N×G×K×E.

    Runs are contiguous, so at most one document crosses the start of a chunk: that of the last token before it.
    """
    runs_BxGxC = to_chunks(runs_BxL, chunk_size)
    last_BxG = runs_BxGxC[:, :, -1]
    crosses_BxGxC = (runs_BxGxC == last_BxG[:, :, None]) & (runs_BxGxC > 0)
    k_NxGxCxK = jnp.where(repeat_for_heads(crosses_BxGxC, k_NxLxK)[..., None], to_chunks(k_NxLxK, chunk_size), 0)
    sums_NxGxKxE = matmul(k_NxGxCxK, to_chunks(v_NxLxE, chunk_size), transpose_a=True, dtype=dtype)
    return sums_before(sums_NxGxKxE, repeat_for_heads(last_BxG, k_NxLxK), initial_NxKxE)


def repeat_for_heads(x_Bx: jax.Array, like_Nx: jax.Array) -> jax.Array:
    """Repeats each sequence for its heads; a single one broadcasts anyway."""
    rows, folded = x_Bx.shape[0], like_Nx.shape[0]
    return x_Bx if rows in (1, folded) else jnp.repeat(x_Bx, folded // rows, axis=0)
