"""Absolute positions, added to the embedding, and relative biases, added to attention scores."""

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.dense import KERNEL_INITS
from flash_lm.ops import positions as ops
from flash_lm.ops.products import matmul

_T5_BUCKETS, _T5_MAX_DISTANCE = 32, 128


class LearnedPositions(nnx.Module):
    """One vector a position; there are max_length of them."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draws the table."""
        shape = (config.max_length, config.model_dim)
        self.table = nnx.Param(KERNEL_INITS["normal"](rngs.params(), shape, jnp.dtype(config.param_dtype)))

    def __call__(self, positions_BxL: jax.Array) -> jax.Array:
        """B×L×D; a position at or over max_length gives NaN rather than a wrong vector."""
        return self.table[...].at[positions_BxL].get(mode="fill", fill_value=jnp.nan)


class Sinusoid(nnx.Module):
    """Fixed sines and cosines."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Has no parameters."""
        self.width = config.model_dim

    def __call__(self, positions_BxL: jax.Array) -> jax.Array:
        """B×L×D."""
        return ops.sinusoid(positions_BxL, self.width)


class ScaledSinusoid(Sinusoid):
    """Fixed sines and cosines times one learned scalar (FLASH, appendix: ScaledSin)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Starts with 1/√D, so that the encoding has the length of a vector of unit variance over √D."""
        super().__init__(config, rngs=rngs)
        self.scale = nnx.Param(jnp.asarray(config.model_dim**-0.5, jnp.dtype(config.param_dtype)))

    def __call__(self, positions_BxL: jax.Array) -> jax.Array:
        """B×L×D."""
        return super().__call__(positions_BxL) * self.scale[...].astype(jnp.float32)


ABSOLUTE_POSITIONS = {"learned": LearnedPositions, "sinusoid": Sinusoid, "scaled_sinusoid": ScaledSinusoid}


class ToeplitzBias(nnx.Module):
    """w[j − i], w ∈ R^(2n−1) (FLASH, appendix, for n ≤ 512)."""

    def __init__(self, reach: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draws w for distances below `reach`."""
        self.reach = reach
        self.weight = nnx.Param(KERNEL_INITS["normal"](rngs.params(), (2 * reach - 1,), jnp.dtype(config.param_dtype)))

    def __call__(self, query_BxLx1: jax.Array, key_Bx1xM: jax.Array) -> jax.Array:
        """B×L×M from the indices of queries and keys."""
        place = (key_Bx1xM - query_BxLx1 + self.reach - 1).clip(0, 2 * self.reach - 2)
        return self.weight[...].astype(jnp.float32)[place]


class T5Bias(nnx.Module):
    """One scalar a bucket of distances (T5)."""

    def __init__(self, reach: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draws the scalars; any distance has a bucket."""
        self.causal = config.causal
        self.weight = nnx.Param(KERNEL_INITS["normal"](rngs.params(), (_T5_BUCKETS,), jnp.dtype(config.param_dtype)))

    def __call__(self, query_BxLx1: jax.Array, key_Bx1xM: jax.Array) -> jax.Array:
        """B×L×M from the indices of queries and keys."""
        bucket = ops.t5_bucket(
            key_Bx1xM - query_BxLx1, causal=self.causal, buckets=_T5_BUCKETS, max_distance=_T5_MAX_DISTANCE
        )
        return self.weight[...].astype(jnp.float32)[bucket]


class RopeBias(nnx.Module):
    """rope(a)ᵢ · rope(b)ⱼ with learned a, b ∈ R^S (FLASH, appendix, for n > 512); any distance."""

    def __init__(self, reach: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draws a and b."""
        dtype = jnp.dtype(config.param_dtype)
        self.query = nnx.Param(KERNEL_INITS["normal"](rngs.params(), (config.shared_dim,), dtype))
        self.key = nnx.Param(KERNEL_INITS["normal"](rngs.params(), (config.shared_dim,), dtype))

    def __call__(self, query_BxLx1: jax.Array, key_Bx1xM: jax.Array) -> jax.Array:
        """B×L×M from the indices of queries and keys."""
        rotated_query = self._rotated(self.query[...], query_BxLx1[..., 0])
        rotated_key = self._rotated(self.key[...], key_Bx1xM[:, 0])
        rows = max(rotated_query.shape[0], rotated_key.shape[0])
        rotated_query, rotated_key = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in (rotated_query, rotated_key))
        return matmul(rotated_query, rotated_key, transpose_b=True)

    @staticmethod
    def _rotated(vector_S: jax.Array, index_BxL: jax.Array) -> jax.Array:
        vector = vector_S.astype(jnp.float32)[None, None, None]
        return ops.rotate(vector, ops.rotary_table(index_BxL, vector_S.size))[:, 0]


RELATIVE_BIASES = {"toeplitz": ToeplitzBias, "t5": T5Bias, "rope": RopeBias}
