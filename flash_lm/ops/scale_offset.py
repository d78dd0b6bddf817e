"""Scale-offset x ⊙ γ + β (FLASH, eq. 3), with a fast backward pass for the sums over tokens."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def scale_offset(x_BxHxLxK: jax.Array, scale_HxK: jax.Array, offset_HxK: jax.Array) -> jax.Array:
    """Scale-offset x ⊙ γ + β (FLASH, eq. 3).

    Args:
        x_BxHxLxK: H may be 1, for parameters of several heads.
        scale_HxK: γ; it is rounded to the dtype of x, and its gradient is not.
        offset_HxK: β, likewise.

    Returns:
        B×H×L×K, dtype of x.
    """
    scale_HxK, offset_HxK = (p.astype(x_BxHxLxK.dtype) for p in (scale_HxK, offset_HxK))
    return x_BxHxLxK * scale_HxK[None, :, None] + offset_HxK[None, :, None]


def _forward(x_BxHxLxK, scale_HxK, offset_HxK):
    return scale_offset(x_BxHxLxK, scale_HxK, offset_HxK), (x_BxHxLxK, scale_HxK)


def _backward(kept, d_BxHxLxK):
    x_BxHxLxK, scale_HxK = kept
    # Computed once: XLA's CPU backend would recompute it in each of the sums, element by element.
    d_BxHxLxK = jax.lax.optimization_barrier(d_BxHxLxK)
    d_x = d_BxHxLxK * scale_HxK.astype(d_BxHxLxK.dtype)[None, :, None]
    if x_BxHxLxK.shape[1] != d_x.shape[1]:
        d_x = d_x.sum(axis=1, keepdims=True)
    sums = ((d_BxHxLxK * x).sum(axis=(0, 2), dtype=jnp.float32) for x in (x_BxHxLxK, 1))
    return d_x, *(x.astype(scale_HxK.dtype) for x in sums)


scale_offset.defvjp(_forward, _backward)
