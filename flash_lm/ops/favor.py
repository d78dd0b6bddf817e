"""FAVOR+, attention by positive orthogonal random features ("Rethinking Attention with Performers", Choromanski 2021).

exp(q·k) is the mean over ω ~ N(0, I) of φ_ω(q) φ_ω(k) with φ_ω(x) = exp(ω·x − ‖x‖²/2) (lemma 1), so softmax
attention is estimated by attention that is linear in the features. Features differ by factors beyond the range of any
float, so we compute with logarithms: sums over keys have a maximum per feature, and a query has the maximum
of the keys it sees (see `ops.logsumexp_means`), which never includes a later key. If all logarithms are moderate,
features are used directly, and this is linear attention.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.linear_attention import append_ones, linear_sums
from flash_lm.ops.logsumexp_means import (
    NOTHING,
    Sums,
    add,
    add_to_blocks,
    exponentials,
    mean_by_either,
    nothing,
    only,
    ratio,
    sum_over_blocks,
    without_max,
)
from flash_lm.ops.matmul import matmul
from flash_lm.ops.mixed_chunk_attention import heads_into_batch
from flash_lm.ops.rectangles import Rectangles, carry_over_blocks, crossing, last_run_mask, neighbours
from flash_lm.ops.segments import Segments

_MODERATE = 30.0  # bound of a logarithm: even the square of exp(-30) is far from float32's limit


def orthogonal_frequencies(key: jax.Array, count: int, width: int) -> jax.Array:
    """Samples ω: Gaussian vectors that are orthogonal to each other in blocks of `width` (section 2.4).

    Args:
        key: random key.
        count: number of features F.
        width: K.

    Returns:
        F×K float32.
    """
    directions_key, norms_key = jax.random.split(key)
    gaussian = jax.random.normal(directions_key, (-(-count // width), width, width), jnp.float32)
    # With a positive diagonal of the triangle, the orthogonal factor is uniform over all rotations.
    orthogonal, triangle = jnp.linalg.qr(gaussian)
    signs = jnp.sign(jnp.diagonal(triangle, axis1=-2, axis2=-1))
    directions_FxK = (orthogonal * signs[:, None, :]).swapaxes(1, 2).reshape(-1, width)[:count]
    norms = jnp.linalg.norm(jax.random.normal(norms_key, (count, width), jnp.float32), axis=-1, keepdims=True)
    return directions_FxK * norms


def log_features(x: jax.Array, frequencies_FxK: jax.Array) -> jax.Array:
    """Logarithms log φ(x / K^¼) = ω·x / K^¼ − ‖x‖² / (2 √K), so that φ(q)·φ(k) estimates F exp(q·k / √K).

    Args:
        x: (…, K).
        frequencies_FxK: ω.

    Returns:
        (…, F) float32.
    """
    scaled = x.astype(jnp.float32) * x.shape[-1] ** -0.25
    # An exponent needs full precision, even if products have less by default.
    products = jnp.einsum("...k,fk->...f", scaled, frequencies_FxK, precision="highest")
    return products - jnp.square(scaled).sum(axis=-1, keepdims=True) / 2


class FeatureSums(NamedTuple):
    """State of FAVOR+: maximum over keys of log φ(k), and Σ φ(k) [v, 1]ᵀ / exp(max), for each feature; float32.

    The sum's last column is for the denominator. A decode state is over all keys so far and has no dimension G; its
    size is constant.
    """

    max_BxHxGxF: jax.Array
    sum_BxHxGxFxE: jax.Array


def no_features(batch: int, heads: int, features: int, value_width: int) -> FeatureSums:
    """The sums over no keys, B×H×…; `value_width` without the denominator."""
    top = jnp.full((batch, heads, features), NOTHING, jnp.float32)
    return FeatureSums(top, jnp.zeros((*top.shape, value_width + 1), jnp.float32))


def favor(
    log_q_BxHxLxF: jax.Array,
    log_k_BxHxLxF: jax.Array,
    v_BxHxLxE: jax.Array,
    segments: Segments,
    *,
    block_size: int,
    causal: bool,
    packed: bool,
) -> jax.Array:
    """FAVOR+: φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k) over the keys of the query's document; if causal, none after the query.

    Args:
        log_q_BxHxLxF: `log_features` of the queries.
        log_k_BxHxLxF: `log_features` of the keys.
        v_BxHxLxE: values.
        segments: the documents of each sequence.
        block_size: size of the blocks in which pairs are computed one by one; a power of two.
        causal: hide keys after the query.
        packed: a sequence may hold several documents.

    Returns:
        B×H×L×E, dtype of v. Padding gets zeros.
    """
    runs_BxL = segments.runs_BxL
    real = (runs_BxL > 0)[:, None, :, None]

    def stable_form(log_q: jax.Array, log_k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        # One state over all keys serves all queries of a single document.
        if not causal and not packed:
            return without_max(_read(log_q, _key_sums(log_k, append_ones(v), real)))
        # Bidirectional: the tokens after each one are those before it in the reversed sequence.
        sums = _causal_sums(log_q, log_k, v, runs_BxL, block_size)
        if not causal:
            log_q, log_k, v = (jnp.flip(x, 2) for x in (log_q, log_k, v))
            later = _causal_sums(log_q, log_k, v, jnp.flip(runs_BxL, 1), block_size, include_self=False)
            sums = add(sums, jax.tree.map(lambda x: jnp.flip(x, 2), later))
        return without_max(sums)

    def product_form(log_q: jax.Array, log_k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A factor per query cancels in the quotient, so its maximum is dropped.
        phi_q, _ = _scaled_exp(log_q)
        features = (x.astype(v_BxHxLxE.dtype) for x in (phi_q, jnp.exp(log_k), append_ones(v)))
        q, k, values = (heads_into_batch(x) for x in features)
        sums = linear_sums(q, k, values, segments, chunk_size=block_size, causal=causal, packed=packed)
        sums = sums.reshape(*v.shape[:3], -1)
        return sums[..., :-1], jnp.where(real, sums[..., -1:], 1)

    moderate = lambda log_q, log_k, v: _fits(log_q, log_k, real)
    arrays = (log_q_BxHxLxF, log_k_BxHxLxF, v_BxHxLxE.astype(jnp.float32))
    return jnp.where(real, mean_by_either(moderate, product_form, stable_form, *arrays), 0).astype(v_BxHxLxE.dtype)


def _fits(log_q: jax.Array, log_k: jax.Array, real: jax.Array) -> jax.Array:
    """Whether float32 can hold the sums of plain features, with a query's features divided by its largest.

    A query sees itself, so its denominator is at least the weight of itself.
    """
    self_share = (log_q + log_k).max(axis=-1, keepdims=True) - log_q.max(axis=-1, keepdims=True)
    return (jnp.where(real, self_share, 0).min() >= -_MODERATE) & (jnp.where(real, log_k, 0).max() <= _MODERATE)


def prefill_favor(
    log_q_BxHxLxF: jax.Array,
    log_k_BxHxLxF: jax.Array,
    v_BxHxLxE: jax.Array,
    state: FeatureSums,
    real_BxL: jax.Array,
    *,
    block_size: int,
) -> tuple[jax.Array, FeatureSums]:
    """Causal attention that continues from the tokens summed in the state.

    Args:
        log_q_BxHxLxF: `log_features` of the queries.
        log_k_BxHxLxF: `log_features` of the keys.
        v_BxHxLxE: values.
        state: B×H×….
        real_BxL: which tokens are not padding; padding is at the end.
        block_size: as for `favor`.

    Returns:
        B×H×L×E, dtype of v; and the state after the real tokens.
    """
    # Beyond the last position padding may be NaN, and zero times NaN is NaN.
    real = real_BxL[:, None, :, None]
    log_q, log_k, v = (jnp.where(real, x, 0) for x in (log_q_BxHxLxF, log_k_BxHxLxF, v_BxHxLxE.astype(jnp.float32)))
    sums = _causal_sums(log_q, log_k, v, real_BxL.astype(jnp.int32), block_size, initial=state)
    state = _add_features(state, _key_sums(log_k, append_ones(v), real))
    return ratio(sums).astype(v_BxHxLxE.dtype), state


def _causal_sums(
    log_q: jax.Array,
    log_k: jax.Array,
    v: jax.Array,
    runs_BxL: jax.Array,
    block_size: int,
    *,
    include_self: bool = True,
    initial: FeatureSums | None = None,
) -> Sums:
    """The sums of each token over the visible keys before it, and with `include_self` over itself."""
    length = v.shape[2]
    block = min(block_size, 1 << (length - 1).bit_length())
    pad = lambda x, axis: jnp.pad(x, [(0, -length % block if i == axis else 0) for i in range(x.ndim)])
    # Pad to full blocks; padding is in no run.
    log_q, log_k, v, runs = pad(log_q, 2), pad(log_k, 2), pad(v, 2), pad(runs_BxL, 1)
    values = append_ones(v)
    sums = _self_sums(log_q, log_k, v, (runs > 0)[:, None, :, None]) if include_self else nothing(v, 1)

    def look(where: Rectangles) -> Sums:
        visible_keys, visible_queries = crossing(runs, where)
        keys, key_values = where.keys(log_k, 2), where.keys(values, 2)
        pairs = _pair_sums(where.queries(log_q, 2), keys, key_values, visible_keys[:, None, :, :, None])
        return only(pairs, visible_queries)

    # Pairs inside a block by divide and conquer, then the state of the blocks before.
    sums = sum_over_blocks(sums, block, look)
    if block < log_q.shape[2] or initial is not None:
        blocks = neighbours(block).queries
        runs_BxGxC = blocks(runs, 1)
        of_block = _key_sums(blocks(log_k, 2), blocks(values, 2), last_run_mask(runs_BxGxC)[:, None, :, :, None])
        empty = no_features(log_q.shape[0], log_q.shape[1], log_q.shape[3], v.shape[3])
        entering, visible = carry_over_blocks(of_block, runs_BxGxC, _add_features, empty, initial)
        sums = add_to_blocks(sums, only(_read(blocks(log_q, 2), entering), visible))
    return jax.tree.map(lambda x: x[:, :, :length], sums)


def _self_sums(log_q: jax.Array, log_k: jax.Array, v: jax.Array, visible: jax.Array) -> Sums:
    """Each query with the key of the same token."""
    logs = log_q + log_k
    top = jax.lax.stop_gradient(logs.max(axis=-1, keepdims=True))
    weight = jnp.exp(logs - top).sum(axis=-1, keepdims=True)
    alone = Sums(weight * v, weight, top)
    return Sums(*(jnp.where(visible, x, none) for x, none in zip(alone, nothing(v, 1), strict=True)))


def _pair_sums(log_q: jax.Array, log_k: jax.Array, values: jax.Array, visible: jax.Array) -> Sums:
    """Queries (…, C, F) over keys (…, M, F) with values (…, M, E + 1), pair by pair; visible keys: (…, M, 1)."""
    if log_k.shape[-2] == 1:  # too small for a matrix product to pay off
        return _self_sums(log_q, log_k, values[..., :-1], visible)
    phi_k, top_k = exponentials(log_k, visible)
    phi_q, top = _scaled_exp(log_q + top_k)
    return _sums(matmul(matmul(phi_q, phi_k, transpose_b=True), values), top)


def _key_sums(log_k: jax.Array, values: jax.Array, visible: jax.Array) -> FeatureSums:
    """State of the keys of axis −2, which is removed."""
    phi_k, top = exponentials(log_k, visible)
    return FeatureSums(top[..., 0, :], matmul(phi_k, values, transpose_a=True))


def _read(log_q: jax.Array, of_keys: FeatureSums) -> Sums:
    """The sums of queries (…, C, F) over all the summed keys (…, F)."""
    phi_q, top = _scaled_exp(log_q + of_keys.max_BxHxGxF[..., None, :])
    return _sums(matmul(phi_q, of_keys.sum_BxHxGxFxE), top)


def _add_features(a: FeatureSums, b: FeatureSums) -> FeatureSums:
    """Adds sums over disjoint keys."""
    top = jnp.maximum(a.max_BxHxGxF, b.max_BxHxGxF)
    scale_a, scale_b = (jnp.exp(x.max_BxHxGxF - top)[..., None] for x in (a, b))
    return FeatureSums(top, a.sum_BxHxGxFxE * scale_a + b.sum_BxHxGxFxE * scale_b)


def _scaled_exp(logs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp(logs − max) and the maximum over the features."""
    top = jax.lax.stop_gradient(logs.max(axis=-1, keepdims=True))
    return jnp.exp(logs - top), top


def _sums(values: jax.Array, top: jax.Array) -> Sums:
    """Numerator and denominator, the last column of the values."""
    return Sums(values[..., :-1], values[..., -1:], top)
