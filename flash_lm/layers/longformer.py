"""Longformer's attention: windows that may grow with depth, gaps, global tokens ("Longformer", section 3)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.attention import AttentionSublayer, Projected, join_heads, split_heads
from flash_lm.layers.context import Context
from flash_lm.layers.core import Pair
from flash_lm.layers.dense import Dense
from flash_lm.layers.sublayer import LayerArray
from flash_lm.layers.window_core import WindowCore, WindowInputs, WindowOptions
from flash_lm.ops.positions import rotate


class LongformerAttention(AttentionSublayer[WindowInputs]):
    """Multi-head attention to a window and to global tokens, which have projections of their own."""

    core: WindowCore

    def __init__(self, options: WindowOptions, config: ModelConfig, *, rngs: nnx.Rngs):
        """H heads of width D / H."""
        dim, layers = config.model_dim, range(config.num_layers)
        most = max(config.max_length, options.size)
        # Of all layers of the model, from the first.
        self.windows = tuple(min(round(options.size * options.growth**n), most) for n in layers)
        self.gaps = tuple(options.dilations[n * len(options.dilations) // len(layers)] for n in layers)
        self.rotary = bool(config.rotary)
        self.heads = self.key_heads = config.num_heads
        self.key_width = self.value_width = dim // self.heads
        self.core = WindowCore(max(self.windows), options, config)
        self.query, self.key, self.value, self.output = (Dense(dim, dim, config, rngs=rngs) for _ in range(4))
        if options.global_tokens:
            self.global_query, self.global_key, self.global_value = (Dense(dim, dim, config, rngs=rngs) for _ in "qkv")
        self.projection_weights = (7 if options.global_tokens else 4) * dim * dim
        # Those of the first layer, unless a stack says which layers these are.
        first = self.of_layers(np.zeros(1, np.int32))
        self.window, self.stage = (LayerArray(first[name][0]) for name in ("window", "stage"))

    def of_layers(self, numbers_N: np.ndarray) -> dict[str, jax.Array]:
        """Windows and dilations."""
        self.core.layers = tuple((self.windows[n], self.gaps[n]) for n in numbers_N)
        own_windows, own_gaps = zip(*self.core.layers, strict=True)
        stages = [self.core.dilations.index(gap) for gap in own_gaps]
        return {"window": jnp.asarray(own_windows, jnp.int32), "stage": jnp.asarray(stages, jnp.int32)}

    def project(self, x_BxLxD: jax.Array, context: Context) -> Projected[WindowInputs]:
        """Heads of queries, keys and values; of global tokens, too, if there are any."""
        heads_of = lambda *maps: (split_heads(dense(x_BxLxD), self.heads) for dense in maps)
        q, k, v = heads_of(self.query, self.key, self.value)
        pair, own = self._rotated(q, k, context), None
        if self.core.global_tokens:
            own_q, own_k, own_v = heads_of(self.global_query, self.global_key, self.global_value)
            own, v = self._rotated(own_q, own_k, context), jnp.concatenate([v, own_v], axis=-1)
        return Projected(WindowInputs(pair, own, self.window[...], self.stage[...]), v)

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))

    def _rotated(self, q: jax.Array, k: jax.Array, context: Context) -> Pair:
        if self.rotary_width is None:
            return Pair(q, k)
        return Pair(*(rotate(x, context.rotary[self.rotary_width]) for x in (q, k)))
