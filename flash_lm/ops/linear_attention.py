"""Linear attention: φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k) ("Transformers are RNNs", Katharopoulos et al. 2020, eq. 5–12).

Chunkwise form: the state of the chunks before that of the query, and pairs inside the chunk. A column of ones
beside the values makes the denominator one more value. Features and the states of chunks have the dtype of the values;
numerators and denominators, and all accumulators, are float32.
"""

import jax
import jax.numpy as jnp

from flash_lm.ops.matmul import matmul
from flash_lm.ops.mixed_chunk_attention import (
    global_attention,
    global_attention_both_ways,
    global_attention_in_segments,
    local_attention,
    repeat_for_heads,
)
from flash_lm.ops.segments import Segments, prefix_segments
from flash_lm.ops.visibility import KeySpan, causal_key_span, document_key_span


def elu_plus_one(x: jax.Array) -> jax.Array:
    """The paper's feature map φ(x) = elu(x) + 1 (eq. 7), positive everywhere."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def linear_attention(
    q_NxLxK: jax.Array,
    k_NxLxK: jax.Array,
    v_NxLxE: jax.Array,
    segments: Segments,
    *,
    chunk_size: int,
    causal: bool,
    packed: bool,
    prefix_BxL: jax.Array | None = None,
) -> jax.Array:
    """Linear attention over the keys of the query's document; if causal, none after the query.

    Args:
        q_NxLxK: features φ(q), which are rounded to the dtype of v; heads are folded into the batch.
        k_NxLxK: features φ(k), likewise.
        v_NxLxE: values.
        segments: the documents of each sequence.
        chunk_size: C.
        causal: hide keys after the query.
        packed: a sequence may hold several documents.
        prefix_BxL: number of first tokens of a token's document that all of it sees, even ahead, (B or 1)×(L or 1);
            None: none.

    Returns:
        N×L×E, dtype of v. Padding gets zeros.
    """
    values = append_ones(v_NxLxE)
    q_NxLxK, k_NxLxK = (x.astype(v_NxLxE.dtype) for x in (q_NxLxK, k_NxLxK))
    sums = linear_sums(q_NxLxK, k_NxLxK, values, segments, chunk_size=chunk_size, causal=causal, packed=packed)
    if prefix_BxL is not None:
        # A query after the prefix sees the same keys as a causal query.
        first = prefix_segments(segments, prefix_BxL)
        of_first = linear_sums(q_NxLxK, k_NxLxK, values, first, chunk_size=chunk_size, causal=False, packed=packed)
        sums = jnp.where(repeat_for_heads(first.runs_BxL > 0, q_NxLxK)[..., None], of_first, sums)
    return ratio(sums).astype(v_NxLxE.dtype)


def linear_sums(
    q_NxLxK: jax.Array,
    k_NxLxK: jax.Array,
    values: jax.Array,
    segments: Segments,
    *,
    chunk_size: int,
    causal: bool,
    packed: bool,
) -> jax.Array:
    """φ(q)ᵀ Σ φ(k) [v, 1]ᵀ, N×L×(E+1) float32; `values`: from `append_ones`; otherwise as `linear_attention`."""
    ones = jnp.ones(segments.runs_BxL.shape, jnp.float32)
    if causal:
        # Chunkwise form: states of the earlier chunks, and pairs inside the chunk.
        key_span = document_key_span(segments, causal=True)
        weight_BxL = jnp.where(key_span.before_chunk(chunk_size) > 0, ones, 0)
        across = {"chunk_size": chunk_size, "weight_BxL": weight_BxL, "dtype": jnp.float32}
        sums, _ = global_attention(q_NxLxK, k_NxLxK, values, segments.runs_BxL, **across)
        return sums + _inside_chunks(q_NxLxK, k_NxLxK, values, key_span, chunk_size)
    whole = {"weight_BxL": ones, "dtype": jnp.float32}
    if packed:
        return global_attention_in_segments(q_NxLxK, k_NxLxK, values, segments, chunk_size=chunk_size, **whole)
    return global_attention_both_ways(q_NxLxK, k_NxLxK, values, segments.runs_BxL, **whole)


def prefill_linear(
    q_NxLxK: jax.Array,
    k_NxLxK: jax.Array,
    v_NxLxE: jax.Array,
    state_NxKxE: jax.Array,
    real_NxL: jax.Array,
    *,
    chunk_size: int,
    first_NxL: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention that continues from the tokens summed in the state.

    Args:
        q_NxLxK: features φ(q), float32.
        k_NxLxK: features φ(k), float32.
        v_NxLxE: values.
        state_NxKxE: Σ φ(k) [v, 1]ᵀ so far, N×K×(E+1) float32.
        real_NxL: which tokens are not padding; padding is at the end.
        chunk_size: C.
        first_NxL: which tokens are in the prefix, and see all of it; None: there is none.

    Returns:
        N×L×E, dtype of v; and the state after the real tokens.
    """
    # Beyond the last position padding may be NaN, and zero times NaN is NaN.
    q_NxLxK, k_NxLxK, v_NxLxE = (jnp.where(real_NxL[..., None], x, 0) for x in (q_NxLxK, k_NxLxK, v_NxLxE))
    values, before = append_ones(v_NxLxE.astype(jnp.float32)), state_NxKxE
    sums, state_NxKxE = prefill_sums(q_NxLxK, k_NxLxK, values, before, real_NxL, chunk_size=chunk_size)
    if first_NxL is not None:
        of_first = before + matmul(jnp.where(first_NxL[..., None], k_NxLxK, 0), values, transpose_a=True)
        sums = jnp.where(first_NxL[..., None], matmul(q_NxLxK, of_first), sums)
    return ratio(sums).astype(v_NxLxE.dtype), state_NxKxE


def prefill_sums(
    q_NxLxK: jax.Array,
    k_NxLxK: jax.Array,
    values: jax.Array,
    state_NxKxE: jax.Array,
    real_NxL: jax.Array,
    *,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Unnormalised linear attention φ(q)ᵀ Σ φ(k) vᵀ that continues from a state.

    Args:
        q_NxLxK: features φ(q), float32; padding is zero.
        k_NxLxK: features φ(k), float32; padding is zero.
        values: N×L×E float32, finite.
        state_NxKxE: Σ φ(k) vᵀ so far, float32.
        real_NxL: which tokens are not padding; padding is at the end.
        chunk_size: C.

    Returns:
        N×L×E float32; and the state after the real tokens.
    """
    # The state of the decoder enters as the state before the first chunk.
    runs_NxL, chunk_size = real_NxL.astype(jnp.int32), min(chunk_size, real_NxL.shape[1])
    sums, _ = global_attention(
        q_NxLxK,
        k_NxLxK,
        values,
        runs_NxL,
        chunk_size=chunk_size,
        weight_BxL=real_NxL.astype(jnp.float32),
        initial_NxKxE=state_NxKxE,
        sums_dtype=jnp.float32,
    )
    index_1xL = jnp.arange(real_NxL.shape[1], dtype=jnp.int32)[None]
    sums += _inside_chunks(q_NxLxK, k_NxLxK, values, causal_key_span(index_1xL, real_NxL), chunk_size)
    return sums, state_NxKxE + matmul(k_NxLxK, values, transpose_a=True)


def _inside_chunks(q_NxLxK, k_NxLxK, values_NxLxE, key_span: KeySpan, chunk_size: int) -> jax.Array:
    return local_attention(
        q_NxLxK,
        k_NxLxK,
        values_NxLxE,
        key_span,
        chunk_size=chunk_size,
        function="identity",
        scale=1.0,
        divisor_BxL=jnp.ones(key_span.first_BxL.shape, jnp.float32),
        dtype=jnp.float32,
    )


def append_ones(v_NxLxE: jax.Array) -> jax.Array:
    """The values with a column of ones, whose sum is the denominator."""
    return jnp.concatenate([v_NxLxE, jnp.ones_like(v_NxLxE[..., :1])], axis=-1)


def ratio(sums_NxLxE: jax.Array) -> jax.Array:
    """Normalises: numerator over denominator without an ε, which would bias small features. Padding has 0 / 0."""
    total = sums_NxLxE[..., -1:]
    return sums_NxLxE[..., :-1] / jnp.where(total > 0, total, 1)
