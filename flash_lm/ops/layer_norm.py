"""Layer normalisation, with a backward pass that keeps nothing but what came in."""

import jax
import jax.numpy as jnp

EPSILON = 1e-6


@jax.custom_vjp
def layer_norm(x_BxLxD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """(x − mean) / √(variance + ε) · scale + bias over the last dimension ("Layer Normalization", Ba et al. 2016).

    Args:
        x_BxLxD: any dtype.
        scale_D: float32.
        bias_D: float32.

    Returns:
        B×L×D, dtype of x.
    """
    normal_BxLxD, _ = _normalised(x_BxLxD)
    return (normal_BxLxD * scale_D[None, None] + bias_D[None, None]).astype(x_BxLxD.dtype)


def _normalised(x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x − mean) / √(variance + ε), and 1 / √(variance + ε), in float32."""
    x = x_BxLxD.astype(jnp.float32)
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + EPSILON)
    return centred * inverse, inverse


def _forward(x_BxLxD, scale_D, bias_D):
    return layer_norm(x_BxLxD, scale_D, bias_D), (x_BxLxD, scale_D)


def _backward(kept, d_BxLxD):
    x_BxLxD, scale_D = kept
    # Made once: XLA's CPU backend would make them again in each of the sums, element by element.
    x_BxLxD, d_BxLxD = jax.lax.optimization_barrier((x_BxLxD, d_BxLxD))
    normal, inverse = _normalised(x_BxLxD)
    d = d_BxLxD.astype(jnp.float32)
    d_normal = d * scale_D[None, None]
    along = (d_normal * normal).mean(axis=-1, keepdims=True)
    d_x = inverse * (d_normal - d_normal.mean(axis=-1, keepdims=True) - normal * along)
    return d_x.astype(x_BxLxD.dtype), (d * normal).sum(axis=(0, 1)), d.sum(axis=(0, 1))


layer_norm.defvjp(_forward, _backward)
