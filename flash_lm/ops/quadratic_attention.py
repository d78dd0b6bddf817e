"""Quadratic attention over all pairs: softmax ("Attention Is All You Need", eq. 1), relu² of FLASH-Quad (eq. 4).

The plain form holds an L×M array of weights; the blocked form (see `blocked_attention`) holds one block of it at a time
and recomputes it in the backward pass, so its memory grows only linearly with L.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from flash_lm.ops import blocked_attention
from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.blocked_attention import Settings
from flash_lm.ops.matmul import matmul
from flash_lm.ops.visibility import KeySpan

# Index of a key minus index of a query -> bias of the same shape, float32, or with the heads in front
Bias = Callable[[jax.Array], jax.Array]


def quadratic_attention(
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    key_span: KeySpan,
    *,
    function: str,
    scale: float,
    divisor_BxL: jax.Array,
    bias: Bias | None = None,
    blocked: bool = False,
) -> jax.Array:
    """Quadratic attention f(scale · q kᵀ + b) / N · v over the keys that each query sees.

    Args:
        q_BxHxLxK: queries.
        k_BxHxMxK: keys, at indices 0 … M − 1.
        v_BxHxMxE: values.
        key_span: keys that each query sees.
        function: a name of `ATTENTION_FUNCTIONS`.
        scale: factor of q kᵀ.
        divisor_BxL: N of each query, (B or 1)×L float32, not zero.
        bias: added to the scores; see `blocked_attention.bias_of_heads`.
        blocked: process one block of queries and keys at a time, for more queries than in a small block.

    Returns:
        B×H×L×E, dtype of v. A query that sees no key gets zeros.
    """
    if blocked and q_BxHxLxK.shape[2] > blocked_attention.SMALLEST:
        settings = Settings(function, scale)
        return blocked_attention.attend(q_BxHxLxK, k_BxHxMxK, v_BxHxMxE, key_span, divisor_BxL, settings, bias)[0]
    # Plain form: all scores at once.
    scores_BxHxLxM, visible_Bx1xLxM = compute_scores(q_BxHxLxK, k_BxHxMxK, key_span, scale, bias)
    weights = ATTENTION_FUNCTIONS[function]
    weights_BxHxLxM = weights(scores_BxHxLxM, visible_Bx1xLxM, divisor_BxL[:, None, :, None])
    return matmul(weights_BxHxLxM.astype(v_BxHxMxE.dtype), v_BxHxMxE).astype(v_BxHxMxE.dtype)


def compute_scores(
    q_BxHxLxK: jax.Array, k_BxHxMxK: jax.Array, key_span: KeySpan, scale: float, bias: Bias | None
) -> tuple[jax.Array, jax.Array]:
    """All scores, B×H×L×M float32, and which pairs are visible, (B or 1)×1×L×M; arguments as above."""
    places_M = jnp.arange(k_BxHxMxK.shape[2], dtype=jnp.int32)
    scores_BxHxLxM = matmul(q_BxHxLxK, k_BxHxMxK, transpose_b=True) * scale
    if bias is not None:
        distance_BxLxM = places_M[None, None] - key_span.index_BxL[..., None]
        scores_BxHxLxM += jnp.swapaxes(blocked_attention.bias_of_heads(bias, distance_BxLxM), 0, 1)
    return scores_BxHxLxM, key_span.visible(places_M)[:, None]
