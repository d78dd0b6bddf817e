"""Matrix products over folded batch dimensions, with float32 accumulators."""

import jax
import jax.numpy as jnp


def matmul(a_xLxK: jax.Array, b_xKxM: jax.Array, *, transpose_a: bool = False, transpose_b: bool = False) -> jax.Array:
    """Multiplies the last two dimensions of two arrays that agree in all the others.

    Args:
        a_xLxK: (..., L, K), or (..., K, L) with `transpose_a`.
        b_xKxM: (..., K, M), or (..., M, K) with `transpose_b`.
        transpose_a: multiply with the transpose of a.
        transpose_b: multiply with the transpose of b.

    Returns:
        (..., L, M), float32 for any operands.
    """
    leading = a_xLxK.shape[:-2]
    a_NxLxK = a_xLxK.reshape(-1, *a_xLxK.shape[-2:])
    b_NxKxM = b_xKxM.reshape(-1, *b_xKxM.shape[-2:])
    contract = ((1 if transpose_a else 2,), (2 if transpose_b else 1,))
    out_NxLxM = jax.lax.dot_general(a_NxLxK, b_NxKxM, (contract, ((0,), (0,))), preferred_element_type=jnp.float32)
    return out_NxLxM.reshape(*leading, *out_NxLxM.shape[1:])


def sum_axis(x_xLxM: jax.Array, axis: int) -> jax.Array:
    """Σ over the last dimension but one (-2) or the last (-1), which stays with size 1; float32.

    As products with ones: XLA's CPU backend adds along a dimension one number at a time.
    """
    length, width = x_xLxM.shape[-2:]
    x_NxLxM = x_xLxM.reshape(-1, length, width).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST  # an accelerator's default would round the terms
    if axis == -1:
        sums = jnp.matmul(x_NxLxM.reshape(-1, width), jnp.ones((width, 1), jnp.float32), precision=highest)
        return sums.reshape(*x_xLxM.shape[:-1], 1)
    ones_Nx1xL = jnp.ones((len(x_NxLxM), 1, length), jnp.float32)
    return jnp.matmul(ones_Nx1xL, x_NxLxM, precision=highest).reshape(*x_xLxM.shape[:-2], 1, width)
