"""Layer norm, RMS norm and ScaleNorm over the model dimension or a head, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.ops.layer_norm import layer_norm, rms_norm


class LayerNorm(nnx.Module):
    """(x − mean) / √(variance + ε) · scale + bias ("Layer Normalization", Ba et al. 2016)."""

    def __init__(self, config: ModelConfig):
        """Starts without rescaling: scale 1, bias 0."""
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.model_dim, jnp.dtype(config.param_dtype)))
        self.bias = nnx.Param(jnp.zeros(config.model_dim, jnp.dtype(config.param_dtype)))

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Normalises the last dimension; dtype of x."""
        scale, bias = self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return layer_norm(x_BxLxD, scale, bias, self.epsilon)


class RMSNorm(nnx.Module):
    """x / √(mean of x² + ε) · scale ("Root Mean Square Layer Normalization", Zhang and Sennrich 2019)."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        """Starts with scale 1; `width`: of the last dimension, by default D."""
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones(width or config.model_dim, jnp.dtype(config.param_dtype)))

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Normalises the last dimension; dtype of x."""
        return rms_norm(x_BxLxD, self.scale[...].astype(jnp.float32), self.epsilon)


class ScaleNorm(nnx.Module):
    """g · x / max(‖x‖ / √D, ε), g one scalar (FLASH, appendix; "Transformers without Tears", section 2.2)."""

    def __init__(self, config: ModelConfig):
        """Starts with g = 1."""
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones((), jnp.dtype(config.param_dtype)))

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Normalises the last dimension; dtype of x."""
        x = x_BxLxD.astype(jnp.float32)
        # The bound is inside the root, because the gradient of the root of 0 would be infinite.
        normal = x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).mean(axis=-1, keepdims=True), self.epsilon**2))
        return (self.scale[...].astype(jnp.float32) * normal).astype(x_BxLxD.dtype)


HEAD_EPSILON = 1e-6


@jax.checkpoint  # keeps its inputs
def normal_heads(x_BxHxLxE: jax.Array, gain_E: jax.Array | None = None) -> jax.Array:
    """RMS norm per head, x / √(mean of x²), optionally times a gain; dtype of x.

    It replaces the denominator of linear attention, so ε is small: the state of the first tokens may be small.
    """
    # The gain is applied in the dtype of the input, after the division.
    x = x_BxHxLxE.astype(jnp.float32)
    normal = (x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + HEAD_EPSILON)).astype(x_BxHxLxE.dtype)
    return normal if gain_E is None else normal * gain_E.astype(normal.dtype)[None, None, None]


NORMS = {"layer": LayerNorm, "rms": RMSNorm, "scale": ScaleNorm}
