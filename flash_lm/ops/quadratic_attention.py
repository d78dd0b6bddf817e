"""Attention over all pairs of tokens: softmax ("Attention Is All You Need", eq. 1) and FLASH-Quad's relu² (eq. 4).

The plain form holds an L×M array of weights; the blocked form holds one block of queries at a time and recomputes it
in the backward pass, so its memory grows with L only.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.products import matmul

QUERY_BLOCK = 256


class Tokens(NamedTuple):
    """Where queries or keys stand: index in the row and run (see `Segments`), each (B or 1)×L."""

    index_BxL: jax.Array
    runs_BxL: jax.Array


# (index of queries (B or 1)×L×1, index of keys (B or 1)×1×M) -> bias (B or 1)×L×M float32
Bias = Callable[[jax.Array, jax.Array], jax.Array]


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
        blocked: one block of queries at a time, recomputed in the backward pass.

    Returns:
        B×H×L×E, dtype of v. A query that sees no key gets zeros.
    """

    def block(q_BxHxLxK: jax.Array, queries: Tokens, divisor_BxL: jax.Array) -> jax.Array:
        scores_BxHxLxM = matmul(q_BxHxLxK, k_BxHxMxK, transpose_b=True) * scale
        index_BxLx1, index_Bx1xM = queries.index_BxL[:, :, None], keys.index_BxL[:, None, :]
        if bias is not None:
            scores_BxHxLxM += bias(index_BxLx1, index_Bx1xM)[:, None]
        visible_BxLxM = (queries.runs_BxL[:, :, None] == keys.runs_BxL[:, None, :]) & (keys.runs_BxL[:, None, :] > 0)
        if causal:
            visible_BxLxM &= index_Bx1xM <= index_BxLx1
        weights = ATTENTION_FUNCTIONS[function]
        weights_BxHxLxM = weights(scores_BxHxLxM, visible_BxLxM[:, None], divisor_BxL[:, None, :, None])
        return matmul(weights_BxHxLxM.astype(v_BxHxMxE.dtype), v_BxHxMxE).astype(v_BxHxMxE.dtype)

    length = q_BxHxLxK.shape[2]
    if not blocked or length <= QUERY_BLOCK:
        return block(q_BxHxLxK, queries, divisor_BxL)
    arguments = (q_BxHxLxK, queries, divisor_BxL)
    blocks = jax.tree.map(_split_length, arguments)
    out_GxBxHxCxE = jax.lax.map(jax.checkpoint(lambda part: block(*part)), blocks)
    out_BxHxGxCxE = jnp.moveaxis(out_GxBxHxCxE, 0, 2)
    batch, heads, blocks_, size, width = out_BxHxGxCxE.shape
    return out_BxHxGxCxE.reshape(batch, heads, blocks_ * size, width)[:, :, :length]


def _split_length(x: jax.Array) -> jax.Array:
    """B×L or B×H×L×K -> G×B×C or G×B×H×C×K, padded by ones (a divisor must not be zero)."""
    axis = 1 if x.ndim == 2 else 2
    missing = -x.shape[axis] % QUERY_BLOCK
    padded = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=1)
    split = padded.reshape(*x.shape[:axis], -1, QUERY_BLOCK, *x.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)
