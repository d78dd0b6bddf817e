"""Softmax in a sliding window, linear attention with learned features beyond it, one denominator ("LoLCATs")."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import GLU_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, SublayerSpec, grouped_head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.attention_core import Pair, Pairs, PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.linear_core import LinearOptions, linear_flops
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops import banded_softmax as ops
from flash_lm.ops.gather_tokens import index_chosen
from flash_lm.ops.kv_cache import (
    Ring,
    empty_ring,
    positions_in,
    roll_ring,
    unroll_ring,
    unrolled_key_span,
    write,
    write_token,
)
from flash_lm.ops.linear_attention import append_ones, linear_sums, prefill_sums
from flash_lm.ops.matmul import matmul
from flash_lm.ops.mixed_chunk_attention import heads_into_batch
from flash_lm.ops.positions import rotary_table, rotate
from flash_lm.ops.visibility import KeySpan


@section("model.window_linear")
class WindowLinearOptions:
    """Options of a softmax window with linear attention beyond it."""

    size: int = key(96, "W, tokens that the softmax sees, the query itself included", at_least(1))
    first_tokens: int = key(4, "first tokens of each document, which the softmax always sees", at_least(0))
    linear_attention: bool = key(True, "linear attention over the other tokens; False: they are not seen")
    feature_dim: int = key(32, "P, rows of the feature map of a head, which has 2 P features", at_least(1))


class WindowLinearState(NamedTuple):
    """Decode state of constant size; G heads of keys.

    ring: keys and values of the last W tokens.
    first: keys and values of the first tokens.
    sums_BxGxFxE: Σ φ(k) [v, 1]ᵀ of the tokens that are in neither, float32.
    """

    ring: Ring
    first: Ring
    sums_BxGxFxE: jax.Array


class WindowLinearCore(PlainCore):
    """Softmax over the last W and the first tokens, linear attention over all others, under one denominator.

    With n the normalised softmax over the near tokens, o = (γ n + (1 − γ) Σ φ(q)·φ(k) v) / (γ + (1 − γ) Σ φ(q)·φ(k)),
    a γ = σ(w) per head; φ(x) = softmax([x W, −x W]) of queries and keys without rotary positions, a W per head
    ("LoLCATs", Zhang et al. 2024, section 3.2; features of "Hedgehog", Zhang et al. 2024, section 4.2). Two things
    differ from the paper: the far weights are relative to the sum of the near exponentials and not to the largest, and
    features do not see positions. Both were chosen after a trial on single layers of a pretrained model.

    A token that is W tokens old is in the far sums from then on: linear attention of keys that are W tokens late.
    """

    def __init__(self, config: ModelConfig, options: WindowLinearOptions, linear: LinearOptions):
        """A core with a feature map per head of queries and per head of keys; both start as the identity."""
        self.size, self.first_tokens, self.linear = options.size, options.first_tokens, options.linear_attention
        self.heads, self.key_heads = config.num_heads, config.num_kv_heads
        self.groups = self.heads // self.key_heads
        self.chunk_size, self.features = linear.chunk_size, 2 * options.feature_dim
        self.rotary, self.rotary_base = bool(config.rotary), config.rotary_base
        self.state_dtype, dtype = jnp.dtype(config.state_dtype), jnp.dtype(config.param_dtype)
        if self.linear:
            identity_KxP = jnp.eye(config.head_width, options.feature_dim, dtype=dtype)
            feature_map = lambda heads: nnx.Param(jnp.tile(identity_KxP, (heads, 1, 1)))
            self.query_features, self.key_features = feature_map(self.heads), feature_map(self.key_heads)
            # γ = 0.9: the window alone is near to full attention.
            self.window_factor = nnx.Param(jnp.full(self.heads, math.log(9), dtype), **VECTORS)

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """The pair of the window, whose scores are divided by √K; features are of the same queries and keys."""
        return {"window": True}

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        return sum(self.terms(pairs, v, context).values(), start=jnp.zeros((), v.dtype))

    def terms(self, pairs: Pairs, v: jax.Array, context: Context) -> dict[str, jax.Array]:
        """The part of the softmax and the part of linear attention, whose sum is the output."""
        near = self._softmax(pairs["window"], v, context)
        if not self.linear or v.shape[2] <= self.size:
            return {"local": near}
        assert context.segments is not None
        # Keys and values arrive W tokens late, if they are of the same document then.
        late = lambda x_BxGxLx: jnp.pad(x_BxGxLx, ((0, 0), (0, 0), (self.size, 0), (0, 0)))[:, :, : v.shape[2]]
        is_far_BxL = (context.segments.runs_BxL > 0) & self._is_far(context.segments.offsets_BxL)
        q, k = self._features(pairs["far"].q_BxHxLxK, self.query_features), late(self._keys(pairs["far"].k_BxHxLxK))
        sums = linear_sums(
            heads_into_batch(q.astype(v.dtype)),
            self._repeat_into_batch(jnp.where(is_far_BxL[:, None, :, None], k, 0).astype(v.dtype)),
            append_ones(self._repeat_into_batch(late(v))),
            context.segments,
            chunk_size=self.chunk_size,
            causal=True,
            packed=context.packed,
        )
        return self._join(near, sums.reshape(*near.shape[:3], -1))

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> WindowLinearState:
        """An empty window, no first tokens, and sums of zero; `capacity` is not used."""
        ring, first = (
            empty_ring(batch, heads, size, key_width, value_width, self.state_dtype)
            for size in (self.size, self.first_tokens)
        )
        features = self.features * self.linear
        return WindowLinearState(ring, first, jnp.zeros((batch, heads, features, value_width + 1), jnp.float32))

    def prefill(
        self, pairs: Pairs, v: jax.Array, context: Context, state: WindowLinearState
    ) -> tuple[jax.Array, WindowLinearState]:
        """The new tokens attend to those of the state and to each other."""
        assert context.lengths_B is not None
        q, k = pairs["window"]
        start_B, real_BxL = context.positions_BxL[:, 0], context.real()
        seen = unroll_ring(state.ring, k, v, start_B)
        ring = roll_ring(seen, self.size, start_B, context.lengths_B)
        first = self._write_first(state.first, k, v, context)
        # The softmax, over the window and the first tokens.
        keys, values = (jnp.repeat(x, self.groups, axis=1) for x in seen)
        key_span = unrolled_key_span(self.size, start_B, real_BxL, self._window, hidden=self.first_tokens)
        near = self._merge_first(q, self._windowed(q, keys, values, key_span), first, context)
        if not self.linear:
            return near.astype(v.dtype), WindowLinearState(ring, first, state.sums_BxGxFxE)
        # Linear attention: with each new token, the one that is W tokens older leaves the window.
        length = v.shape[2]
        is_far_BxL = real_BxL & self._is_far(context.positions_BxL)
        leaving = self._leaving(seen.key_BxHxRxK[:, :, :length], is_far_BxL, context)
        q = jnp.where(real_BxL[:, None, :, None], pairs["far"].q_BxHxLxK, 0)
        sums, after = prefill_sums(
            heads_into_batch(self._features(q, self.query_features)),
            self._repeat_into_batch(leaving),
            append_ones(self._repeat_into_batch(seen.value_BxHxRxE[:, :, :length].astype(jnp.float32))),
            self._repeat_into_batch(state.sums_BxGxFxE),
            jnp.repeat(real_BxL, self.heads, axis=0),
            chunk_size=self.chunk_size,
        )
        out = self._join(near, sums.reshape(*near.shape[:3], -1))
        after = after.reshape(-1, self.heads, *after.shape[1:])[:, :: self.groups]
        return (out["local"] + out["global"]).astype(v.dtype), WindowLinearState(ring, first, after)

    def step(
        self, pairs: Pairs, v: jax.Array, context: Context, state: WindowLinearState
    ) -> tuple[jax.Array, WindowLinearState]:
        """Adds the oldest token of the window to the sums, and writes the new one in its place."""
        q, k = pairs["window"]
        position_B, real_B = context.positions_BxL[:, 0], context.real()[:, 0]
        # The oldest token is in the slot of the new one.
        sums = state.sums_BxGxFxE
        if self.linear:
            slot_Bx1x1x1 = (position_B % self.size)[:, None, None, None]
            oldest = Ring(*(jnp.take_along_axis(x, slot_Bx1x1x1, axis=2) for x in state.ring))
            is_far_Bx1 = context.real() & self._is_far(context.positions_BxL)
            leaving = self._leaving(oldest.key_BxHxRxK, is_far_Bx1, context)
            sums += matmul(leaving, append_ones(oldest.value_BxHxRxE.astype(jnp.float32)), transpose_a=True)
        ring = write_token(state.ring, k, v, position_B, real_B)
        first = self._write_first(state.first, k, v, context)
        # Softmax over the slots of the window: queries that share a head of keys become several queries of one head.
        grouped = lambda x_BxHx1xK: x_BxHx1xK.reshape(*ring.key_BxHxRxK.shape[:2], self.groups, -1)
        visible_BxR = positions_in(ring, position_B) >= self.first_tokens
        scores = matmul(grouped(q).astype(ring.key_BxHxRxK.dtype), ring.key_BxHxRxK, transpose_b=True)
        window = ops.softmax_of_scores(scores / math.sqrt(q.shape[-1]), visible_BxR[:, None, None], ring.value_BxHxRxE)
        of_heads = lambda x: x.reshape(*q.shape[:3], *x.shape[3:])
        window = ops.SoftmaxPart(*(of_heads(x) for x in window))
        near = self._merge_first(q, window, first, context)
        after = WindowLinearState(ring, first, sums)
        if not self.linear:
            return near.astype(v.dtype), after
        features = grouped(self._features(pairs["far"].q_BxHxLxK, self.query_features))
        out = self._join(near, matmul(features, sums).reshape(*near.shape[:3], -1))
        return (out["local"] + out["global"]).astype(v.dtype), after

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Visible pairs of the softmax, the maps to features, and linear attention of the tokens beyond the window."""
        near = sum(min(t + 1, self.size + self.first_tokens) for t in range(length))
        flops = 2 * heads * near * (key_width + value_width) / length
        if not self.linear or length <= self.size:
            return flops
        maps = (heads + self.key_heads) * key_width * self.features // 2
        return flops + 2 * maps + linear_flops(length, True, self.chunk_size, heads, self.features, value_width)

    @property
    def _window(self) -> jax.Array:
        return jnp.asarray(self.size, jnp.int32)

    def _softmax(self, pair: Pair, v: jax.Array, context: Context) -> jax.Array:
        """The parallel form of the softmax over the window and the first tokens of the document."""
        assert context.segments is not None
        q, k, v = pair.q_BxHxLxK, *(jnp.repeat(x, self.groups, axis=1) for x in (pair.k_BxHxLxK, v))
        offsets_BxL = context.segments.offsets_BxL
        index, first, stop = context.key_span(self._window)
        after_first = jnp.minimum(jnp.maximum(first, index - offsets_BxL + self.first_tokens), stop)
        window = self._windowed(q, k, v, KeySpan(index, after_first, stop))
        if not self.first_tokens:
            return window.out_BxHxLxE
        # The first tokens of the documents, gathered to the front of the sequence.
        is_first_BxL = (offsets_BxL < self.first_tokens) & (context.segments.runs_BxL > 0)
        length = v.shape[2]
        compact = index_chosen(is_first_BxL, length if context.packed else min(self.first_tokens, length))
        to_first = self._over(q, compact.take(k), compact.take(v), compact.keys(context.key_span()))
        return ops.merge_softmaxes([window, to_first])

    def _windowed(self, q: jax.Array, k: jax.Array, v: jax.Array, key_span: KeySpan) -> ops.SoftmaxPart:
        return ops.windowed_softmax(
            q.astype(k.dtype), k, v, key_span, scale=1 / math.sqrt(q.shape[-1]), window=self.size
        )

    def _over(self, q: jax.Array, k: jax.Array, v: jax.Array, key_span: KeySpan) -> ops.SoftmaxPart:
        """Softmax over all keys that are seen."""
        return ops.banded_softmax(q.astype(k.dtype), k, v, key_span, scale=1 / math.sqrt(q.shape[-1]), window=None)

    def _write_first(self, first: Ring, k: jax.Array, v: jax.Array, context: Context) -> Ring:
        """The slots of first tokens are their positions; those beyond are dropped."""
        if not self.first_tokens:
            return first
        slot_BxL = jnp.where(context.real(), context.positions_BxL, self.first_tokens)
        return Ring(*(write(old, new, slot_BxL) for old, new in zip(first, (k, v), strict=True)))

    def _merge_first(self, q: jax.Array, window: ops.SoftmaxPart, first: Ring, context: Context) -> jax.Array:
        """Decoding: merges the softmaxes over the window and over the first tokens."""
        if not self.first_tokens:
            return window.out_BxHxLxE
        position_BxL = context.positions_BxL
        stop_BxL = jnp.where(context.real(), jnp.minimum(position_BxL + 1, self.first_tokens), 0)
        keys, values = (jnp.repeat(x, self.groups, axis=1) for x in first)
        to_first = self._over(q, keys, values, KeySpan(position_BxL, jnp.zeros_like(stop_BxL), stop_BxL))
        return ops.merge_softmaxes([window, to_first])

    def _is_far(self, offsets_BxL: jax.Array) -> jax.Array:
        """Whether the token that is W tokens older is of the same document, and not one of its first."""
        return offsets_BxL >= self.size + self.first_tokens

    def _leaving(self, k_BxGxLxK: jax.Array, is_far_BxL: jax.Array, context: Context) -> jax.Array:
        """Features of the keys that leave the window at each token, without their rotary positions; else zeros."""
        if self.rotary:
            cosines, sines = rotary_table(context.positions_BxL - self.size, k_BxGxLxK.shape[-1], self.rotary_base)
            k_BxGxLxK = rotate(k_BxGxLxK, (cosines, -sines))
        return jnp.where(is_far_BxL[:, None, :, None], self._keys(k_BxGxLxK), 0)

    def _keys(self, k_BxGxLxK: jax.Array) -> jax.Array:
        return self._features(k_BxGxLxK, self.key_features)

    def _features(self, x_BxHxLxK: jax.Array, map_HxKxP: nnx.Param) -> jax.Array:
        """φ(x) = softmax([x W, −x W]), B×H×L×2P float32."""
        x, by_head = (y.astype(jnp.float32) for y in (x_BxHxLxK, map_HxKxP[...]))
        mapped = jnp.einsum("bhlk,hkp->bhlp", x, by_head, precision=jax.lax.Precision.HIGHEST)
        return jax.nn.softmax(jnp.concatenate([mapped, -mapped], axis=-1), axis=-1)

    def _repeat_into_batch(self, x_BxGx: jax.Array) -> jax.Array:
        """Repeats each head of keys for its queries, and folds heads into the batch: N×…, N = B·H."""
        return heads_into_batch(jnp.repeat(x_BxGx, self.groups, axis=1))

    def _join(self, near_BxHxLxE: jax.Array, sums_BxHxLxE: jax.Array) -> dict[str, jax.Array]:
        """Both parts over their common denominator; (1 − γ) / γ = e^(−w)."""
        odds_1xHx1x1 = jnp.exp(-self.window_factor[...].astype(jnp.float32))[None, :, None, None]
        far = odds_1xHx1x1 * sums_BxHxLxE
        total_BxHxLx1 = 1 + far[..., -1:]
        dtype = near_BxHxLxE.dtype
        return {
            "local": (near_BxHxLxE / total_BxHxLx1).astype(dtype),
            "global": (far[..., :-1] / total_BxHxLx1).astype(dtype),
        }


class WindowLinearAttention(MultiHeadAttention):
    """Multi-head attention whose core also takes queries and keys without rotary positions, for their features."""

    def rotate_pairs(self, pairs: Pairs, context: Context) -> Pairs:
        """The pair of the window with rotary positions, and the same pair without."""
        return {**super().rotate_pairs(pairs, context), "far": pairs["window"]}


def _attention(
    config: ModelConfig,
    options: WindowLinearOptions,
    linear: LinearOptions,
    convolution: ConvolutionOptions,
    *,
    rngs: nnx.Rngs,
) -> Sublayer:
    core = WindowLinearCore(config, options, linear)
    return WindowLinearAttention(config, core, convolution, rngs=rngs, key_heads=config.num_kv_heads)


WINDOW_LINEAR = SublayerSpec(
    _attention,
    (WindowLinearOptions, LinearOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS | {"num_kv_heads"},
    defaults={"num_kv_heads": lambda config: config.num_heads},
    problems=grouped_head_problems,
    serves=frozenset({"causal", "packed"}),
)
ROWS = {
    "window_linear": Family(
        (WINDOW_LINEAR, GLU_SPEC),
        {"rotary": True},
        about="softmax in a sliding window and over the first tokens, linear attention with learned features beyond "
        "it, one denominator, and a GLU",
        paper="Zhang et al. 2024, arXiv:2410.10254",
    )
}
