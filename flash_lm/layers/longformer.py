"""Longformer's attention: windows that may grow with depth, gaps, global tokens ("Longformer", section 3)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.attention import (
    AttentionSublayer,
    Projected,
    join_heads,
    normalised,
    query_key_norms,
    split_heads,
)
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions, short_convolutions
from flash_lm.layers.core import Pair
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.sublayer import LayerArray
from flash_lm.layers.window_core import WindowCore, WindowInputs, WindowOptions


class LongformerAttention(AttentionSublayer[WindowInputs]):
    """Multi-head attention to a window and to global tokens, which have projections of their own."""

    core: WindowCore

    def __init__(self, config: ModelConfig, options: WindowOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs):
        """H heads of width D / H."""
        dim, layers = config.model_dim, range(config.num_layers)
        most = max(config.max_length, options.size)
        # Of all layers of the model, from the first.
        self.windows = tuple(min(round(options.size * options.growth**n), most) for n in layers)
        self.gaps = tuple(options.dilations[n * len(options.dilations) // len(layers)] for n in layers)
        self.rotary = bool(config.rotary)
        self.heads = self.key_heads = config.num_heads
        self.key_width = self.value_width = dim // self.heads
        self.core = WindowCore(config, options, max(self.windows))
        self.names = ("query", "key", "value")
        if options.global_tokens:
            self.names += ("global_query", "global_key", "global_value")
        for name in self.names:
            setattr(self, name, Dense(dim, dim, config, rngs=rngs))
        self.query_norm, self.key_norm = query_key_norms(config, self.key_width)
        if options.global_tokens:
            self.global_query_norm, self.global_key_norm = query_key_norms(config, self.key_width)
        self.output = Output(dim, dim, config, rngs=rngs)
        self.convolutions = short_convolutions(dict.fromkeys(self.names, dim), config, convolution)
        self.projection_weights = (len(self.names) + 1) * dim * dim
        # Those of the first layer, unless a stack says which layers these are.
        first = self.of_layers(np.zeros(1, np.int32))
        self.window, self.stage = (LayerArray(first[name][0]) for name in ("window", "stage"))

    def of_layers(self, numbers_N: np.ndarray) -> dict[str, jax.Array]:
        """Windows and dilations."""
        self.core.layers = tuple((self.windows[n], self.gaps[n]) for n in numbers_N)
        own_windows, own_gaps = zip(*self.core.layers, strict=True)
        stages = [self.core.dilations.index(gap) for gap in own_gaps]
        return {"window": jnp.asarray(own_windows, jnp.int32), "stage": jnp.asarray(stages, jnp.int32)}

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Queries, keys and values; those of global tokens, too, if there are any."""
        return {name: getattr(self, name)(x_BxLxD) for name in self.names}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[WindowInputs]:
        """Their heads."""
        q, k, v, *of_global = (split_heads(x, self.heads) for x in maps.values())
        pairs = {"window": Pair(normalised(q, self.query_norm), normalised(k, self.key_norm))}
        if of_global:
            own_q, own_k, own_v = of_global
            pairs["own"] = Pair(normalised(own_q, self.global_query_norm), normalised(own_k, self.global_key_norm))
            v = jnp.concatenate([v, own_v], axis=-1)
        pairs = self.rotated(pairs, context)
        return Projected(WindowInputs(pairs["window"], pairs.get("own"), self.window[...], self.stage[...]), v)

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))
