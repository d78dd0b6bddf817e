"""Nyström attention: softmax attention approximated with landmarks ("Nyströmformer", Xiong et al. 2021, section 3).

A sequence is one document. Its real tokens are cut into m segments of nearly equal length, and the mean of each is a
landmark. With the three softmax matrices F (tokens to landmarks), A (landmarks to landmarks) and B (landmarks to
tokens), softmax(q kᵀ / √K) v is about F Z B v, where Z approaches the pseudo-inverse of A.
"""

import jax
import jax.numpy as jnp

from flash_lm.ops.attention_functions import masked_softmax
from flash_lm.ops.matmul import matmul


def nystrom_attention(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    real_BxL: jax.Array,
    *,
    landmarks: int,
    steps: int,
) -> jax.Array:
    """Nyström attention: softmax(q k̃ᵀ / √K) Z softmax(q̃ kᵀ / √K) v, with time and memory O(L · m).

    A document of m tokens or fewer gets exact softmax attention: each of its tokens is a landmark, so F has the weights
    of all pairs, and mixes the values themselves.

    Args:
        q_BxHxLxK: queries.
        k_BxHxLxK: keys.
        v_BxHxLxE: values.
        real_BxL: which tokens are not padding, which is at the end, (B or 1)×L.
        landmarks: m.
        steps: iterations towards the pseudo-inverse.

    Returns:
        B×H×L×E, dtype of v; meaningless at padding.
    """
    dtype, scale, length = v_BxHxLxE.dtype, q_BxHxLxK.shape[-1] ** -0.5, q_BxHxLxK.shape[2]
    k, v = (jnp.where(real_BxL[:, None, :, None], x, 0) for x in (k_BxHxLxK, v_BxHxLxE))
    scores = lambda x, y: matmul(x, y, transpose_b=True) * scale
    if length <= landmarks:
        weights_BxHxLxL = _softmax(scores(q_BxHxLxK, k), real_BxL[:, None, None])
        return matmul(weights_BxHxLxL.astype(dtype), v).astype(dtype)

    # Landmarks: means of the queries and keys of m segments.
    segment_BxL, count_Bx1 = _segments(real_BxL, landmarks)
    of_segment_BxMxL = segment_BxL[:, None] == jnp.arange(landmarks, dtype=jnp.int32)[None, :, None]
    landmark_q, landmark_k = (_means(x, of_segment_BxMxL) for x in (q_BxHxLxK, k))
    is_landmark_Bx1x1xM = of_segment_BxMxL.any(axis=-1)[:, None, None]
    # The three softmax matrices F, B and A of the Nyström approximation.
    to_landmarks = _softmax(scores(q_BxHxLxK, landmark_k), is_landmark_Bx1x1xM)
    from_landmarks = _softmax(scores(landmark_q, k), real_BxL[:, None, None])
    mixed_BxHxMxE = matmul(from_landmarks.astype(dtype), v)
    is_short_Bx1x1x1 = (count_Bx1 <= landmarks)[..., None, None]
    # Of a short document A could be singular, and Z large.
    between = jax.nn.softmax(scores(landmark_q, landmark_k), axis=-1)
    between = jnp.where(is_short_Bx1x1x1, jnp.eye(landmarks, dtype=jnp.float32)[None, None], between)
    # F Z B v from right to left; a short document keeps its values, which makes F exact.
    of_landmarks = _product(pseudo_inverse(between, steps), mixed_BxHxMxE)
    values_BxHxMxE = jnp.where(is_short_Bx1x1x1, v[:, :, :landmarks].astype(jnp.float32), of_landmarks)
    return matmul(to_landmarks.astype(dtype), values_BxHxMxE.astype(dtype)).astype(dtype)


def pseudo_inverse(a_BxHxMxM: jax.Array, steps: int) -> jax.Array:
    """Z after so many of Z ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z))), from Z₀ = Aᵀ / (‖A‖₁ ‖A‖∞) (section 3.2).

    Args:
        a_BxHxMxM: float32; norms are per matrix, so Z depends on no other sequence or head.
        steps: iterations; 6 in the paper. Far from convergence, Z leaves out A's small singular values.

    Returns:
        B×H×M×M float32.
    """
    size = jnp.abs(a_BxHxMxM)
    norms = size.sum(axis=-2).max(axis=-1) * size.sum(axis=-1).max(axis=-1)
    z = jnp.swapaxes(a_BxHxMxM, -1, -2) / norms[..., None, None]
    eye = jnp.eye(a_BxHxMxM.shape[-1], dtype=jnp.float32)[None, None]
    for _ in range(steps):
        az = _product(a_BxHxMxM, z)
        z = 0.25 * _product(z, 13 * eye - _product(az, 15 * eye - _product(az, 7 * eye - az)))
    return z


def _segments(real_BxL: jax.Array, landmarks: int) -> tuple[jax.Array, jax.Array]:
    """The segment of each token, −1 for padding, and the number of real tokens, (B or 1)×1.

    The lengths of a document's segments differ by at most one. A short document's tokens are a segment each.
    """
    index_1xL = jnp.arange(real_BxL.shape[1], dtype=jnp.int32)[None]
    count_Bx1 = real_BxL.sum(axis=1, keepdims=True, dtype=jnp.int32)
    segment_BxL = index_1xL * landmarks // jnp.maximum(count_Bx1, landmarks)
    return jnp.where(real_BxL, segment_BxL, -1), count_Bx1


def _means(x_BxHxLxK: jax.Array, of_segment_BxMxL: jax.Array) -> jax.Array:
    """Landmarks: the mean of each segment, B×H×M×K, dtype of x; zero of a segment without tokens."""
    batch, heads, length, width = x_BxHxLxK.shape
    x_BxLxN = jnp.swapaxes(x_BxHxLxK, 1, 2).reshape(batch, length, -1)
    of_segment = jnp.broadcast_to(of_segment_BxMxL, (batch, *of_segment_BxMxL.shape[1:]))
    sums_BxMxN = matmul(of_segment.astype(x_BxLxN.dtype), x_BxLxN)
    count_BxMx1 = jnp.maximum(of_segment_BxMxL.sum(axis=-1, keepdims=True, dtype=jnp.int32), 1)
    means_BxMxHxK = (sums_BxMxN / count_BxMx1.astype(jnp.float32)).reshape(batch, -1, heads, width)
    return jnp.swapaxes(means_BxMxHxK, 1, 2).astype(x_BxHxLxK.dtype)


def _softmax(scores: jax.Array, visible: jax.Array) -> jax.Array:
    return masked_softmax(scores, visible, jnp.ones((1, 1, 1, 1), jnp.float32))


def _product(a_BxHxMxN: jax.Array, b_BxHxNxE: jax.Array) -> jax.Array:
    """In float32 also on a GPU, whose default has 10 bits: Z divides by small singular values, and magnifies errors."""
    return jnp.matmul(a_BxHxMxN, b_BxHxNxE, precision=jax.lax.Precision.HIGHEST)
