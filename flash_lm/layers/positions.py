"""Position encodings: absolute, added to the embedding; relative biases (T5, Toeplitz, RoPE), added to the scores."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.layers.dense import KERNEL_INITS
from flash_lm.ops import positions as ops

_T5_BUCKETS, _T5_MAX_DISTANCE = 32, 128


def replicate(table_NxD: jax.Array) -> jax.Array:
    """The table, replicated on each device of a mesh: lookups in a sharded table would reshard the activations."""
    if jax.sharding.get_abstract_mesh().empty:
        return table_NxD
    return jax.lax.with_sharding_constraint(table_NxD, jax.sharding.PartitionSpec())


class LearnedPositions(nnx.Module):
    """Learned absolute positions: one vector per position up to max_length."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Initialises the table."""
        shape = (config.max_length, config.model_dim)
        table = KERNEL_INITS["normal"](rngs.params(), shape, jnp.dtype(config.param_dtype))
        self.table = nnx.Param(table, positions=True)

    def __call__(self, x_BxLxD: jax.Array, positions_BxL: jax.Array) -> jax.Array:
        """Adds the positions' vectors; a position of max_length or more gives NaN rather than a wrong vector."""
        return x_BxLxD + self.table[...].at[positions_BxL].get(mode="fill", fill_value=jnp.nan)


class Sinusoid(nnx.Module):
    """Sinusoidal positions: fixed sines and cosines."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Creates no parameters."""
        self.width = config.model_dim

    def __call__(self, x_BxLxD: jax.Array, positions_BxL: jax.Array) -> jax.Array:
        """Adds the sines and cosines of the positions."""
        return x_BxLxD + ops.sinusoid(positions_BxL, self.width)


class ScaledSinusoid(Sinusoid):
    """ScaledSin: fixed sines and cosines times one learned scalar (FLASH, appendix)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Starts with 1/√D, so that the encoding's norm is that of a vector of unit variance, divided by √D."""
        super().__init__(config, rngs=rngs)
        self.scale = nnx.Param(jnp.asarray(config.model_dim**-0.5, jnp.dtype(config.param_dtype)))

    def __call__(self, x_BxLxD: jax.Array, positions_BxL: jax.Array) -> jax.Array:
        """Adds the scaled sines and cosines."""
        # For each sequence, even if all have the same positions: else the gradient of the one scalar would be summed
        # over sequences first, and devices would exchange L×D numbers.
        table_BxLxD = jnp.broadcast_to(ops.sinusoid(positions_BxL, self.width), x_BxLxD.shape)
        return x_BxLxD + table_BxLxD * self.scale[...].astype(jnp.float32)


ABSOLUTE_POSITIONS = {"learned": LearnedPositions, "sinusoid": Sinusoid, "scaled_sinusoid": ScaledSinusoid}


MakeBias = Callable[[int], Any]  # takes the largest distance needed, in tokens (exclusive)


class ToeplitzBias(nnx.Module):
    """Toeplitz bias: w[j − i], w ∈ R^(2n−1) (FLASH, appendix, for n ≤ 512)."""

    def __init__(self, reach: int, width: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """Initialises w for distances below `reach`."""
        self.reach = reach
        self.weight = nnx.Param(KERNEL_INITS["normal"](rngs.params(), (2 * reach - 1,), jnp.dtype(config.param_dtype)))

    def __call__(self, distance: jax.Array) -> jax.Array:
        """Float32 of the shape of `distance`, index of the key minus index of the query; the same below."""
        # Distances beyond the reach share the weight of the largest, as at padding.
        index = (distance + self.reach - 1).clip(0, 2 * self.reach - 2)
        return self.weight[...].astype(jnp.float32)[index]


class T5Bias(nnx.Module):
    """T5 bias: one scalar per bucket of distances."""

    reach = None

    def __init__(self, reach: int, width: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """Initialises the scalars; every distance has a bucket."""
        self.causal = config.causal
        self.weight = nnx.Param(KERNEL_INITS["normal"](rngs.params(), (_T5_BUCKETS,), jnp.dtype(config.param_dtype)))

    def __call__(self, distance: jax.Array) -> jax.Array:
        """The scalar of each distance's bucket."""
        # Buckets are exact for near tokens and logarithmic for far ones.
        bucket = ops.t5_bucket(distance, causal=self.causal, buckets=_T5_BUCKETS, max_distance=_T5_MAX_DISTANCE)
        return self.weight[...].astype(jnp.float32)[bucket]


class RopeBias(nnx.Module):
    """RoPE bias: rope(a)ᵢ · rope(b)ⱼ with learned a, b ∈ R^S (FLASH, appendix, for n > 512); any distance."""

    reach = None

    def __init__(self, reach: int, width: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """Initialises a and b."""
        dtype = jnp.dtype(config.param_dtype)
        self.query = nnx.Param(KERNEL_INITS["normal"](rngs.params(), (width,), dtype))
        self.key = nnx.Param(KERNEL_INITS["normal"](rngs.params(), (width,), dtype))

    def __call__(self, distance: jax.Array) -> jax.Array:
        """A · rope(b) at the distance: rotating both changes their product only by the difference of the angles."""
        # rope(a) at distance 0 is a itself, so only b is rotated.
        a, b = (x[...].astype(jnp.float32).reshape(*[1] * distance.ndim, -1) for x in (self.query, self.key))
        cosines, signed_sines = ops.rotary_table(distance, a.size)
        return (a * b * cosines + a * jnp.roll(b, a.size // 2, axis=-1) * signed_sines).sum(axis=-1)


RELATIVE_BIASES = {"toeplitz": ToeplitzBias, "t5": T5Bias, "rope": RopeBias}


def relative_bias(name: str, width: int, config: ModelConfig, *, rngs: nnx.Rngs) -> MakeBias | None:
    """A function that makes the bias of this name for queries and keys of a width; None if the name is "none"."""
    return None if name == "none" else partial(RELATIVE_BIASES[name], width=width, config=config, rngs=rngs)
