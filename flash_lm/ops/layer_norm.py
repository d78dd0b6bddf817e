"""Layer and RMS normalisation whose backward passes keep the inputs, and of each vector its mean and deviation."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x_xD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, epsilon: float) -> jax.Array:
    """(x − mean) / √(variance + ε) · scale + bias over the last dimension ("Layer Normalization", Ba et al. 2016).

    Args:
        x_xD: (…, D), any dtype.
        scale_D: float32.
        bias_D: float32.
        epsilon: ε.

    Returns:
        (…, D), dtype of x.
    """
    return _scale_and_shift(x_xD, scale_D, bias_D, *_mean_and_inverse(x_xD, epsilon))


def _mean_and_inverse(x_xD: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """The mean, and 1 / √(variance + ε), (…, 1) float32."""
    x = x_xD.astype(jnp.float32)
    mean = x.mean(axis=-1, keepdims=True)
    return mean, jax.lax.rsqrt(jnp.square(x - mean).mean(axis=-1, keepdims=True) + epsilon)


def _scale_and_shift(x_xD, scale_D, bias_D, mean, inverse) -> jax.Array:
    normal = (x_xD.astype(jnp.float32) - mean) * inverse
    return (normal * over_tokens(scale_D, x_xD) + over_tokens(bias_D, x_xD)).astype(x_xD.dtype)


def over_tokens(vector_D: jax.Array, like_xD: jax.Array) -> jax.Array:
    """The vector with as many dimensions as `like`; it is along the last one."""
    return vector_D.reshape((1,) * (like_xD.ndim - 1) + (-1,))


def _forward(x_xD, scale_D, bias_D, epsilon):
    # With mean and deviation, which are two numbers a vector, the sums below read their operands once.
    of_row = _mean_and_inverse(x_xD, epsilon)
    return _scale_and_shift(x_xD, scale_D, bias_D, *of_row), (x_xD, scale_D, *of_row)


def _backward(epsilon, kept, d_xD):
    x_xD, scale_D, mean, inverse = kept
    # Computed once: XLA's CPU backend would recompute them in each of the sums, element by element.
    x_xD, d_xD = jax.lax.optimization_barrier((x_xD, d_xD))
    normal = (x_xD.astype(jnp.float32) - mean) * inverse
    d = d_xD.astype(jnp.float32)
    d_normal, tokens = d * over_tokens(scale_D, d), tuple(range(d.ndim - 1))
    along = (d_normal * normal).mean(axis=-1, keepdims=True)
    d_x = inverse * (d_normal - d_normal.mean(axis=-1, keepdims=True) - normal * along)
    return d_x.astype(x_xD.dtype), (d * normal).sum(axis=tokens), d.sum(axis=tokens)


layer_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x_xD: jax.Array, scale_D: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm x / √(mean of x² + ε) · scale over the last dimension (Zhang and Sennrich 2019).

    Args:
        x_xD: (…, D), any dtype.
        scale_D: float32.
        epsilon: ε.

    Returns:
        (…, D), dtype of x.
    """
    return _rms_forward(x_xD, scale_D, epsilon)[0]


def _rms_forward(x_xD, scale_D, epsilon):
    # In float32: sums of squares in bfloat16 would be too coarse.
    x = x_xD.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + epsilon)
    return (x * inverse * over_tokens(scale_D, x)).astype(x_xD.dtype), (x_xD, scale_D, inverse)


def _rms_backward(epsilon, kept, d_xD):
    x_xD, scale_D, inverse = kept
    x_xD, d_xD = jax.lax.optimization_barrier((x_xD, d_xD))
    normal, d = x_xD.astype(jnp.float32) * inverse, d_xD.astype(jnp.float32)
    d_normal = d * over_tokens(scale_D, d)
    d_x = inverse * (d_normal - normal * (d_normal * normal).mean(axis=-1, keepdims=True))
    return d_x.astype(x_xD.dtype), (d * normal).sum(axis=tuple(range(d.ndim - 1)))


rms_norm.defvjp(_rms_forward, _rms_backward)
