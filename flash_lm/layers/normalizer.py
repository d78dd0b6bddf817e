"""The scale of the scores and the divisor N of the unsoftmaxed attentions, from `model.normalizer`.

count: N is the number of visible keys, hence exact under padding, packing and decoding.
An integer: N is that constant.
length: N is the row's length, as the published codes have it.
paper: relu²(q kᵀ / n + b), as FLASH's appendix has it.

Inside a chunk all but count take the chunk's length for n. The last two depend on the length of the whole row, so they
cannot be decoded.
"""

import jax
import jax.numpy as jnp


def undecodable(normalizer: str) -> str | None:
    """Why there can be no decoding, if there can be none."""
    if normalizer not in ("length", "paper"):
        return None
    return f"model.normalizer={normalizer} depends on the whole row and cannot be decoded: use count or an integer"


def scale(normalizer: str, width: int, length: int, function: str) -> float:
    """Factor of q kᵀ: 1/√width, or 1/length in the paper's appendix. Softmax brings its own normalisation."""
    return 1 / length if normalizer == "paper" and function != "softmax" else width**-0.5


def constant(normalizer: str, length: int) -> int | None:
    """N where it is the same for all queries, else None; `length`: of the row, or of the chunk for its local part."""
    constants = {"count": None, "length": length, "paper": 1}
    return constants[normalizer] if normalizer in constants else int(normalizer)


def divisor(normalizer: str, count_BxL: jax.Array, length: int) -> jax.Array:
    """N of each query, float32.

    Args:
        normalizer: `model.normalizer`.
        count_BxL: keys that each query can see.
        length: of the row.
    """
    n = constant(normalizer, length)
    return (jnp.maximum(count_BxL, 1) if n is None else jnp.full_like(count_BxL, n)).astype(jnp.float32)
