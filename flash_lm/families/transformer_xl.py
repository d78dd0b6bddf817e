"""Transformer-XL: segment-level recurrence and relative positions (Dai et al. 2019)."""

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import SublayerSpec, times, width_problems
from flash_lm.layers.attention import AttentionSublayer, Projected, join_heads, split_heads
from flash_lm.layers.attention_core import PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.dense import NEVER, Dense, Output
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.positions import replicate
from flash_lm.ops import transformer_xl as ops
from flash_lm.ops.kv_cache import Ring, empty_ring
from flash_lm.ops.transformer_xl import SegmentInputs, Values


@section("model.xl")
class XLOptions:
    """Options of segment-level recurrence."""

    segment: int = key(128, "C, tokens of a segment, and of the memory, which is the segment before", at_least(1))
    memory_gradient: bool = key(
        False, "whether the derivative goes through the memory into the tokens before; bidirectional: always"
    )


class SegmentCore(PlainCore):
    """Segment-level recurrence: softmax over the segment and the memory, the previous segment; or over both neighbours.

    Attributes:
        apart: whether the values as memory, which have another derivative, follow the values in the last dimension;
            otherwise they are the same.
    """

    def __init__(self, config: ModelConfig, options: XLOptions):
        """A core without parameters."""
        self.segment, self.state_dtype = options.segment, jnp.dtype(config.state_dtype)
        self.apart = bool(config.causal) and not options.memory_gradient

    def __call__(self, by: SegmentInputs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        reach = ops.BACK if context.causal else ops.AROUND
        return ops.attend_segments(by, self._values(v), context.key_span(), segment=self.segment, reach=reach)

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> Ring:
        """Two segments without tokens; `capacity` is not used."""
        return empty_ring(batch, heads, 2 * self.segment, key_width, value_width, self.state_dtype)

    def prefill(self, by: SegmentInputs, v: jax.Array, context: Context, state: Ring) -> tuple[jax.Array, Ring]:
        """Continues each sequence from any position in a segment."""
        assert context.lengths_B is not None
        start_B = context.positions_BxL[:, 0]
        return ops.prefill_segments(by, self._values(v), state, start_B, context.lengths_B, segment=self.segment)

    def step(self, by: SegmentInputs, v: jax.Array, context: Context, state: Ring) -> tuple[jax.Array, Ring]:
        """One token per sequence."""
        position_B, real_B = context.positions_BxL[:, 0], context.real()[:, 0]
        return ops.step_segments(by, self._values(v).current, state, position_B, real_B, segment=self.segment)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Two scores and a weighted value for each visible pair, and the map of the distances."""
        # Pairs inside each segment, and with the segment before it.
        full, rest = divmod(length, self.segment)
        sizes = [self.segment] * full + [rest]
        pairs = sum(n * (n + 1) / 2 if causal else n * n for n in sizes)
        pairs += (1 if causal else 2) * sum(a * b for a, b in itertools.pairwise(sizes))
        # The projections of the distances, which all queries share.
        back = min(length, 2 * self.segment)  # distances from 0 on
        distances = back if causal else 2 * back - 1
        of_distances = distances * heads * key_width * heads * value_width
        return 2 * (heads * pairs * (2 * key_width + value_width) + of_distances) / length

    def _values(self, v: jax.Array) -> Values:
        return Values(*jnp.split(v, 2, axis=-1)) if self.apart else Values(v, v)


class SegmentAttention(AttentionSublayer[SegmentInputs]):
    """Multi-head attention with segment-level recurrence, over the segment and its memory.

    The memory is the input of this sublayer, one segment earlier. Unless `xl.memory_gradient` or bidirectional, its
    derivative ends at the weights of keys and values, as it does between batches in the authors' code.
    """

    core: SegmentCore  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, options: XLOptions, *, rngs: nnx.Rngs):
        """H heads of width D / H."""
        dim, self.heads = config.model_dim, config.num_heads
        self.core, self.rotary, self.key_heads = SegmentCore(config, options), False, self.heads
        self.key_width = self.value_width = dim // self.heads
        self.projection_weights = 4 * dim * dim
        self.query, self.key, self.value = (Dense(dim, dim, config, rngs=rngs) for _ in range(3))
        # A bias would add the same number to all scores of a query, which leaves their softmax as it is.
        self.distance = Dense(dim, dim, config, rngs=rngs, biased=NEVER)
        self.output = Output(dim, dim, config, rngs=rngs)
        # The biases u and v of the paper: of the content, and of the position.
        bias = lambda: nnx.Param(jnp.zeros((self.heads, self.key_width), jnp.dtype(config.param_dtype)), **VECTORS)
        self.content_bias, self.position_bias = bias(), bias()

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Queries, keys and values; and keys and values as memory."""
        # Unless model.xl.memory_gradient is on, the memory gets no gradient.
        key, value = self.key(x_BxLxD), self.value(x_BxLxD)
        memory_key, memory_value = key, value
        if self.core.apart:  # computed once all the same: the compiler merges equal products
            memory = jax.lax.stop_gradient(x_BxLxD)
            memory_key, memory_value = self.key(memory), self.value(memory)
        of_memory = {"memory_key": memory_key, "memory_value": memory_value}
        return {"query": self.query(x_BxLxD), "key": key, "value": value, **of_memory}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[SegmentInputs]:
        """Heads; queries with u and with v."""
        names = ("query", "key", "value", "memory_key", "memory_value")
        q, k, v, memory_k, memory_v = (split_heads(maps[name], self.heads) for name in names)
        u, w = (x[...].astype(q.dtype)[None, :, None] for x in (self.content_bias, self.position_bias))
        # Whole on each device: what it maps are distances, which no device has a part of.
        kernel = replicate(self.distance.kernel[...].astype(q.dtype))
        kernel_DxHxK = kernel.reshape(len(kernel), self.heads, self.key_width)
        by = SegmentInputs(q + u, q + w, k, memory_k, kernel_DxHxK)
        return Projected(by, jnp.concatenate([v, memory_v], axis=-1) if self.core.apart else v)

    def finish(self, mixed_BxHxLxE: jax.Array, gate: None) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))


def _problems(config: ModelConfig) -> list[str]:
    problems = width_problems(config)
    if config.model_dim % 2:
        problems.append(f"sinusoids of distances need an even width: model.model_dim={config.model_dim} must be even")
    if config.short_convolution:
        problems.append("model.family=transformer_xl has no short convolutions: set --config.model.short_convolution=0")
    return problems


SEGMENTS = SublayerSpec(SegmentAttention, (XLOptions,), frozenset({"num_heads"}), problems=_problems)
ROWS = {
    "transformer_xl": Family(
        (SEGMENTS, MLP_SPEC),
        {"mlp_dim": times(7, 2)},  # the map of distances is a fifth matrix of D² parameters, which the MLP gives
        about="softmax attention with segment-level recurrence and relative positions, and an MLP",
        paper="Dai et al. 2019, arXiv:1901.02860",
    )
}
