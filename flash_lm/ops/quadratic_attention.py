"""Attention over all pairs of tokens: softmax ("Attention Is All You Need", eq. 1) and FLASH-Quad's relu² (eq. 4).

The plain form holds an L×M array of weights; the blocked form (see `blocked_attention`) holds one block of it at a time
and recomputes it in the backward pass, so its memory grows with L only.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops import blocked_attention
from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.blocked_attention import Settings, Side
from flash_lm.ops.products import matmul


class Tokens(NamedTuple):
    """Where queries or keys stand: index in the row and run (see `Segments`), each (B or 1)×L."""

    index_BxL: jax.Array
    runs_BxL: jax.Array


# Index of a key minus index of a query -> bias of the same shape, float32
Bias = Callable[[jax.Array], jax.Array]


def quadratic_attention(
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    queries: Tokens,
    keys: Tokens,
    *,
    causal: bool,
    function: str,
    scale: float,
    divisor_BxL: jax.Array,
    bias: Bias | None = None,
    blocked: bool = False,
) -> jax.Array:
    """f(scale · q kᵀ + b) / N · v over the keys of the query's own document, and if causal none after it.

    Args:
        q_BxHxLxK: queries.
        k_BxHxMxK: keys.
        v_BxHxMxE: values.
        queries: where the queries stand.
        keys: where the keys stand.
        causal: hide keys whose index is above the query's.
        function: a name of `ATTENTION_FUNCTIONS`.
        scale: factor of q kᵀ.
        divisor_BxL: N of each query, (B or 1)×L float32, not zero.
        bias: added to the scores of all heads.
        blocked: a block of queries and one of keys at a time, when there are more queries than in a small block.

    Returns:
        B×H×L×E, dtype of v. A query that sees no key gets zeros.
    """
    if blocked and q_BxHxLxK.shape[2] > blocked_attention.SMALLEST:
        sides = Side(q_BxHxLxK, *queries), Side(k_BxHxMxK, *keys)
        return blocked_attention.attend(*sides, v_BxHxMxE, divisor_BxL, Settings(causal, function, scale), bias)
    distance_BxLxM = keys.index_BxL[:, None, :] - queries.index_BxL[:, :, None]
    scores_BxHxLxM = matmul(q_BxHxLxK, k_BxHxMxK, transpose_b=True) * scale
    if bias is not None:
        scores_BxHxLxM += bias(distance_BxLxM)[:, None]
    visible_BxLxM = (queries.runs_BxL[:, :, None] == keys.runs_BxL[:, None, :]) & (keys.runs_BxL[:, None, :] > 0)
    if causal:
        visible_BxLxM &= distance_BxLxM <= 0
    weights = ATTENTION_FUNCTIONS[function]
    weights_BxHxLxM = weights(scores_BxHxLxM, visible_BxLxM[:, None], divisor_BxL[:, None, :, None])
    return matmul(weights_BxHxLxM.astype(v_BxHxMxE.dtype), v_BxHxMxE).astype(v_BxHxMxE.dtype)


def fused_softmax_attention(
    q_BxHxLxK: jax.Array, k_BxHxLxK: jax.Array, v_BxHxLxE: jax.Array, runs_BxL: jax.Array | None, *, causal: bool
) -> jax.Array:
    """softmax(q kᵀ / √K) v by cuDNN's fused attention, in half precision on an NVIDIA GPU.

    Args:
        q_BxHxLxK: queries.
        k_BxHxLxK: keys.
        v_BxHxLxE: values.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L, which takes a mask of L×L; None: one document a row.
        causal: hide keys after the query.

    Returns:
        B×H×L×E.
    """
    mask_Bx1xLxL = None
    if runs_BxL is not None:
        mask_Bx1xLxL = (runs_BxL[:, None, :, None] == runs_BxL[:, None, None, :]) & (runs_BxL > 0)[:, None, None, :]
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BxHxLxK, k_BxHxLxK, v_BxHxLxE))
    out_BxLxHxE = jax.nn.dot_product_attention(q, k, v, mask=mask_Bx1xLxL, is_causal=causal, implementation="cudnn")
    return jnp.swapaxes(out_BxLxHxE, 1, 2)
