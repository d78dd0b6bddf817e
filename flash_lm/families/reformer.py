"""Reformer: LSH attention with shared queries and keys ("Reformer", Kitaev et al. 2020, section 2)."""

from collections.abc import Mapping
from typing import NamedTuple

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
from flash_lm.layers.convolution import ConvolutionOptions, short_convolutions
from flash_lm.layers.dense import Dense, Output
from flash_lm.ops.banded_softmax import softmax_of_scores
from flash_lm.ops.kv_cache import write
from flash_lm.ops.lsh_attention import SELF, hash_buckets, lsh_attention, places_seen, sorted_by_bucket, unit
from flash_lm.ops.matmul import matmul
from flash_lm.ops.segments import whole_row
from flash_lm.ops.visibility import is_between


def _even(number: int) -> str | None:
    return None if number > 1 and number % 2 == 0 else "an even number of 2 or more"


@section("model.lsh")
class LSHOptions:
    """Options of LSH attention."""

    num_hashes: int = key(2, "rounds of hashing (multi-round LSH)", at_least(1))
    num_buckets: int = key(32, "values of a hash, an even number", _even)
    window: int = key(
        64, "visible tokens of a bucket in each round, the query itself included; bidirectional: each way", at_least(1)
    )


class Rotations(nnx.Variable):
    """Sampled once and never trained."""


class LSHCache(NamedTuple):
    """KV cache of all tokens so far, at their positions.

    key_BxHxMxK: unit vectors.
    value_BxHxMxE: values.
    place_BxHxMxR: int32, a token's rank in its bucket plus its bucket times (capacity + window), so that those of two
        buckets differ by the window or more.
    """

    key_BxHxMxK: jax.Array
    value_BxHxMxE: jax.Array
    place_BxHxMxR: jax.Array


class LSHCore(PlainCore):
    """LSH attention: softmax(q k̂ᵀ) v over tokens with the same hash, k̂ = q / ‖q‖ (see `ops.lsh_attention`)."""

    state_grows = True

    def __init__(self, config: ModelConfig, options: LSHOptions, *, rngs: nnx.Rngs):
        """Samples the rotations, the same for all heads of the layer."""
        self.window, self.buckets, self.rounds = options.window, options.num_buckets, options.num_hashes
        self.state_dtype = jnp.dtype(config.state_dtype)
        shape = (self.rounds, config.model_dim // config.num_heads, self.buckets // 2)
        self.rotations = Rotations(jax.random.normal(rngs.params(), shape))

    def __call__(self, q: jax.Array, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        assert context.segments is not None
        buckets = hash_buckets(q, self.rotations[...])
        by_bucket = sorted_by_bucket(buckets, context.segments.runs_BxL, self.buckets, self.window)
        return lsh_attention(q, unit(q), v, by_bucket, window=self.window, causal=context.causal)

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> LSHCache:
        """An empty KV cache for `capacity` tokens per sequence."""
        keys, values = (jnp.zeros((batch, heads, capacity, x), self.state_dtype) for x in (key_width, value_width))
        return LSHCache(keys, values, jnp.zeros((batch, heads, capacity, self.rounds), jnp.int32))

    def prefill(self, q: jax.Array, v: jax.Array, context: Context, state: LSHCache) -> tuple[jax.Array, LSHCache]:
        """The parallel form over the cache that holds the new tokens, with only them as queries."""
        capacity = state.key_BxHxMxK.shape[2]
        spacing = capacity + self._reach(capacity)
        slot_BxL = jnp.where(context.real(), context.positions_BxL, capacity)  # padding is out of range and is dropped
        # Write keys, values and buckets of the new tokens to the cache.
        key_BxHxMxK = write(state.key_BxHxMxK, unit(q), slot_BxL)
        value_BxHxMxE = write(state.value_BxHxMxE, v, slot_BxL)
        # A place encodes bucket · spacing + rank, so the bucket of a cached token is a division.
        new_BxHxLxR = jnp.swapaxes(hash_buckets(q, self.rotations[...]), 2, 3)
        buckets_BxHxRxM = jnp.swapaxes(write(state.place_BxHxMxR // spacing, new_BxHxLxR, slot_BxL), 2, 3)
        # Slots after the new tokens need no mask: a causal query neither sees nor counts later tokens.
        by_bucket = sorted_by_bucket(buckets_BxHxRxM, whole_row(capacity).runs_BxL, self.buckets, self.window)
        queries = write(jnp.zeros_like(key_BxHxMxK), q, slot_BxL)
        out_BxHxMxE = lsh_attention(queries, key_BxHxMxK, value_BxHxMxE, by_bucket, window=self.window, causal=True)
        # Read the outputs of the new tokens, and store the places of all tokens.
        read_Bx1xLx1 = jnp.minimum(slot_BxL, capacity - 1)[:, None, :, None]
        out = jnp.take_along_axis(out_BxHxMxE, read_Bx1xLx1, axis=2).astype(v.dtype)
        places_BxHxRxM = buckets_BxHxRxM * spacing + by_bucket.ranks_BxHxRxL
        return out, LSHCache(key_BxHxMxK, value_BxHxMxE, jnp.swapaxes(places_BxHxRxM, 2, 3))

    def step(self, q: jax.Array, v: jax.Array, context: Context, state: LSHCache) -> tuple[jax.Array, LSHCache]:
        """Softmax over the union of the tokens that the rounds see, which equals the merged rounds."""
        capacity = state.key_BxHxMxK.shape[2]
        window = self._reach(capacity)
        spacing = capacity + window
        position_Bx1x1 = context.positions_BxL[..., None]
        slots_1x1xM = jnp.arange(capacity, dtype=jnp.int32)[None, None]
        # The rank of the new token is the number of cached tokens in its bucket.
        first_BxHxR = hash_buckets(q, self.rotations[...])[..., 0] * spacing
        start, stop = (x[:, :, None] for x in (first_BxHxR, first_BxHxR + spacing))
        before_BxHxMxR = is_between(start, state.place_BxHxMxR, stop) & (slots_1x1xM < position_Bx1x1)[..., None]
        place_BxHxR = first_BxHxR + before_BxHxMxR.sum(axis=2, dtype=jnp.int32)
        slot_Bx1 = jnp.where(context.real(), context.positions_BxL, capacity)
        new = (unit(q), v, place_BxHxR[:, :, None])
        state = LSHCache(*(write(old, x, slot_Bx1) for old, x in zip(state, new, strict=True)))
        # Scores over the cache; a token attends to itself only if it sees nothing else.
        scores_BxHx1xM = matmul(q.astype(state.key_BxHxMxK.dtype), state.key_BxHxMxK, transpose_b=True)
        scores_BxHx1xM = jnp.where((slots_1x1xM == position_Bx1x1)[:, None], SELF, scores_BxHx1xM)
        # Visible are tokens whose rank in a common bucket differs by less than the window.
        visible_BxHxM = places_seen(place_BxHxR, state.place_BxHxMxR, window) & (slots_1x1xM <= position_Bx1x1)
        out = softmax_of_scores(scores_BxHx1xM, visible_BxHxM[:, :, None], state.value_BxHxMxE).out_BxHxLxE
        return out.astype(v.dtype), state

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Hashes, and the pairs of the windows of the sorted sequence; the tokens decide how many are visible."""
        near = min(self.window, length) - 1
        further = near * length - near * (near + 1) / 2
        pairs = 1 + further * (1 if causal else 2) / length
        return 2 * heads * self.rounds * (key_width * self.buckets / 2 + pairs * (key_width + value_width))

    def _reach(self, capacity: int) -> int:
        """The window, no larger than ranks can differ."""
        return min(self.window, capacity)


class ReformerAttention(AttentionSublayer[jax.Array]):
    """Multi-head LSH attention; queries and keys share one projection."""

    def __init__(self, config: ModelConfig, options: LSHOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs):
        """H heads of width D / H."""
        # Queries and keys share one projection, as in the paper.
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
        """Splits the heads of shared queries and keys, and of values."""
        return Projected(*(split_heads(maps[name], self.heads) for name in ("query", "value")))

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))


LSH = SublayerSpec(
    ReformerAttention, (LSHOptions, ConvolutionOptions), frozenset({"num_heads"}), problems=width_problems
)
ROWS = {
    "reformer": Family(
        (LSH, MLP_SPEC),
        # As in AFT-conv, the MLP gets the D² parameters that shared queries and keys save.
        {"absolute_positions": "learned", "mlp_dim": times(9, 2)},
        about="LSH attention with shared queries and keys, and an MLP",
        paper="Kitaev et al. 2020, arXiv:2001.04451",
    )
}
