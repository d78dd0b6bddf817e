"""Reformer's attention: queries that are keys as well, each to tokens with the same hash ("Reformer", section 2)."""

from collections.abc import Mapping

import jax
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.attention import AttentionSublayer, Projected, join_heads, split_heads
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions, short_convolutions
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.lsh_core import LSHCore, LSHOptions


class ReformerAttention(AttentionSublayer[jax.Array]):
    """Multi-head attention to tokens with the same hash; one projection gives the queries and the keys."""

    def __init__(self, config: ModelConfig, options: LSHOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs):
        """H heads of width D / H."""
        dim = config.model_dim
        self.core, self.rotary = LSHCore(config, options, rngs=rngs), False
        self.heads = self.key_heads = config.num_heads
        self.key_width = self.value_width = dim // self.heads
        self.projection_weights = 3 * dim * dim
        self.query, self.value = (Dense(dim, dim, config, rngs=rngs) for _ in range(2))
        self.output = Output(dim, dim, config, rngs=rngs)
        self.convolutions = short_convolutions({"query": dim, "value": dim}, config, convolution)

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Queries, which are keys as well, and values."""
        return {"query": self.query(x_BxLxD), "value": self.value(x_BxLxD)}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[jax.Array]:
        """Their heads."""
        return Projected(*(split_heads(maps[name], self.heads) for name in ("query", "value")))

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))
