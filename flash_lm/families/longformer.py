"""Longformer: sliding-window attention, dilated windows and global tokens ("Longformer", section 3)."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, SublayerSpec, head_problems
from flash_lm.layers.attention import (
    AttentionSublayer,
    Projected,
    apply_qk_norm,
    join_heads,
    query_key_norms,
    split_heads,
)
from flash_lm.layers.attention_core import Pair, PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions, short_convolutions
from flash_lm.layers.dense import QUERY_KEY_VALUE, Dense, Output
from flash_lm.layers.quadratic_core import QuadraticOptions
from flash_lm.layers.sublayer import LayerArray
from flash_lm.ops import banded_softmax as ops
from flash_lm.ops.banded_softmax import SoftmaxPart
from flash_lm.ops.gather_tokens import index_chosen
from flash_lm.ops.implementations import report
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
from flash_lm.ops.matmul import matmul
from flash_lm.ops.softmax_choice import PART, softmax_by_library
from flash_lm.ops.visibility import KeySpan


def _dilations(gaps: tuple) -> str | None:
    good = gaps and all(isinstance(gap, int) and gap > 0 for gap in gaps)
    return None if good else "a tuple of positive integers, such as (1, 1, 2, 4)"


@section("model.window")
class WindowOptions:
    """Options of sliding-window attention."""

    size: int = key(
        128, "visible tokens in the first layer, the query itself included; bidirectional: each way", at_least(1)
    )
    growth: float = key(
        1.0, "factor of the window's size from each layer to the next, up to model.max_length", at_least(1)
    )
    dilations: tuple = key(
        (1,),
        "distance from one visible token to the next in the dilated heads, from the first layers to the last",
        _dilations,
    )
    dilated_heads: int = key(2, "heads that are dilated where model.window.dilations says so", at_least(0))
    global_tokens: int = key(0, "first tokens of each document that all of it sees, whatever the window", at_least(0))


class WindowInputs(NamedTuple):
    """Queries and keys of sliding-window attention.

    pair: queries and keys.
    global_pair: queries and keys of global attention; None: no global tokens.
    window: size of this layer's window, int32.
    stage: index of this layer's dilation in increasing order, int32.
    """

    pair: Pair
    global_pair: Pair | None
    window: jax.Array
    stage: jax.Array


class WindowState(NamedTuple):
    """Decode state: the last tokens, and the global tokens.

    ring: keys and values as far as the largest window reaches.
    first: local and global keys and values of the first tokens of each document, B×H×g×K each; or nothing.
    """

    ring: Ring
    first: tuple[jax.Array, ...]


class WindowCore(PlainCore):
    """Sliding-window attention: softmax(q kᵀ / √K) v over the window and the global tokens of the document.

    With global tokens, the values of global attention follow the other values in the last dimension.

    Attributes:
        layers: window and dilation of each layer that this core is stacked over, for counting FLOPs.
    """

    layers: tuple[tuple[int, int], ...]

    def __init__(self, config: ModelConfig, options: WindowOptions, implementation: str, windows: Sequence[int]):
        """A core for layers with these windows; `implementation`: `model.quadratic.implementation`."""
        self.largest, self.global_tokens = max(windows), options.global_tokens
        self.implementation, self.one_window = implementation, len(set(windows)) == 1
        self.dilations = tuple(sorted(set(options.dilations)))
        self.dilated_heads = 0 if self.dilations == (1,) else options.dilated_heads
        self.state_dtype = jnp.dtype(config.state_dtype)
        gap = self.dilations[-1] if self.dilated_heads else 1
        period = math.lcm(*self.dilations)  # so that the first token after the ring begins each folded row
        self.ring_size = -(-((self.largest - 1) * gap + 1) // period) * period

    def __call__(self, by: WindowInputs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        assert context.segments is not None
        (q, k), (values, global_values), offsets_BxL = by.pair, self._split(v), context.segments.offsets_BxL
        if (out := self._attend_by_library(q, k, v, context)) is not None:
            return out
        start_BxL = context.key_span().index_BxL - offsets_BxL

        def key_span(reach: jax.Array) -> KeySpan:
            index, first, stop = context.key_span(reach)
            return KeySpan(index, jnp.minimum(jnp.maximum(first, start_BxL + self.global_tokens), stop), stop)

        # Every token attends to its window, without the global tokens.
        near = self._near(by, k, values, key_span)
        if by.global_pair is None:
            return near.out_BxHxLxE
        # Every token attends to the global tokens, gathered to the front of the sequence.
        is_global_BxL = (offsets_BxL < self.global_tokens) & (context.segments.runs_BxL > 0)
        length = v.shape[2]
        compact = index_chosen(is_global_BxL, length if context.packed else min(self.global_tokens, length))
        to_global = self._over(q, compact.take(k), compact.take(values), compact.keys(context.key_span()))
        # Global tokens attend to all of their document, with the projections of global attention.
        from_global = self._over(
            compact.take(by.global_pair.q_BxHxLxK),
            by.global_pair.k_BxHxLxK,
            global_values,
            compact.queries(context.key_span()),
        )
        return jnp.where(
            is_global_BxL[:, None, :, None],
            compact.put_back(from_global.out_BxHxLxE),
            ops.merge_softmaxes([near, to_global]),
        )

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> WindowState:
        """An empty ring, and no global tokens; `capacity` is not used."""
        ring = empty_ring(batch, heads, self.ring_size, key_width, key_width, self.state_dtype)
        none = jnp.zeros((batch, heads, self.global_tokens, key_width), self.state_dtype)
        return WindowState(ring, (none,) * 4 if self.global_tokens else ())

    def prefill(
        self, by: WindowInputs, v: jax.Array, context: Context, state: WindowState
    ) -> tuple[jax.Array, WindowState]:
        """The new tokens attend to those in the ring and to each other."""
        # The ring with the last tokens is unrolled before the new ones, so windows reach back into it.
        start_B, real_BxL = context.positions_BxL[:, 0], context.real()
        seen = unroll_ring(state.ring, by.pair.k_BxHxLxK, self._split(v)[0], start_B)

        def key_span(reach: jax.Array) -> KeySpan:
            return unrolled_key_span(self.ring_size, start_B, real_BxL, reach, hidden=self.global_tokens)

        # The new ring has the last tokens of all.
        assert context.lengths_B is not None
        ring = roll_ring(seen, self.ring_size, start_B, context.lengths_B)
        near = self._near(by, seen.key_BxHxRxK, seen.value_BxHxRxE, key_span)
        return self._add_global(by, v, context, near, WindowState(ring, state.first))

    def step(
        self, by: WindowInputs, v: jax.Array, context: Context, state: WindowState
    ) -> tuple[jax.Array, WindowState]:
        """Writes the new token to the ring in place, and attends to all of it."""
        q, k = by.pair
        position_B = context.positions_BxL[:, 0]
        ring = write_token(state.ring, k, self._split(v)[0], position_B, context.real()[:, 0])
        slot_position_BxR = positions_in(ring, position_B)
        # Which slots are visible: at a multiple of the dilation, inside the window, and not global.
        back_Bx1xR = (position_B[:, None] - slot_position_BxR)[:, None]
        dilated_H = jnp.arange(q.shape[1]) >= q.shape[1] - self.dilated_heads
        gap_1xHx1 = jnp.where(dilated_H, jnp.asarray(self.dilations, jnp.int32)[by.stage], 1)[None, :, None]
        in_window_BxHxR = (back_Bx1xR % gap_1xHx1 == 0) & (back_Bx1xR <= (by.window - 1) * gap_1xHx1)
        visible_BxHxR = in_window_BxHxR & (slot_position_BxR >= self.global_tokens)[:, None]
        scores = matmul(q.astype(ring.key_BxHxRxK.dtype), ring.key_BxHxRxK, transpose_b=True) / math.sqrt(q.shape[-1])
        near = ops.softmax_of_scores(scores, visible_BxHxR[:, :, None], ring.value_BxHxRxE)
        return self._add_global(by, v, context, near, WindowState(ring, state.first))

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Scores and weighted values of the visible pairs, on average over the layers."""
        # Global tokens see and are seen by all; the others see their windows.
        first = min(self.global_tokens, length)
        rest = length - first

        def near(window: int, gap: int) -> int:
            further = sum(max(rest - n * gap, 0) for n in range(1, window))
            return rest + further * (1 if causal else 2)

        of_first = first * (first + 1) // 2 if causal else first * length
        # Pairs of each layer's window and dilation, averaged over the layers.
        pairs = sum(
            (heads - self.dilated_heads) * near(window, 1) + self.dilated_heads * near(window, dilation)
            for window, dilation in self.layers
        )
        return 4 * key_width * (pairs / len(self.layers) + heads * (of_first + rest * first)) / length

    def _add_global(
        self, by: WindowInputs, v: jax.Array, context: Context, near: SoftmaxPart, state: WindowState
    ) -> tuple[jax.Array, WindowState]:
        """Decoding: writes new global tokens to the state, and merges window and global tokens (online softmax)."""
        if by.global_pair is None:
            return near.out_BxHxLxE.astype(v.dtype), state
        position_BxL, real_BxL = context.positions_BxL, context.real()
        # The first tokens of a document are its global tokens: their slots are their positions.
        slot_BxL = jnp.where(real_BxL, position_BxL, self.global_tokens)  # those beyond are dropped
        values, global_values = self._split(v)
        new = (by.pair.k_BxHxLxK, values, by.global_pair.k_BxHxLxK, global_values)
        first = tuple(write(old, x, slot_BxL) for old, x in zip(state.first, new, strict=True))
        # A token sees the global tokens up to itself.
        stop_BxL = jnp.where(real_BxL, jnp.minimum(position_BxL + 1, self.global_tokens), 0)
        key_span = KeySpan(position_BxL, jnp.zeros_like(stop_BxL), stop_BxL)
        key, value, global_key, global_value = first
        to_global = self._over(by.pair.q_BxHxLxK, key, value, key_span)
        from_global = self._over(by.global_pair.q_BxHxLxK, global_key, global_value, key_span)
        is_global_BxL = position_BxL < self.global_tokens
        out = jnp.where(
            is_global_BxL[:, None, :, None], from_global.out_BxHxLxE, ops.merge_softmaxes([near, to_global])
        )
        return out.astype(v.dtype), WindowState(state.ring, first)

    def _attend_by_library(self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array | None:
        """Plain windows by a library; None: bands of blocks."""
        # Libraries merge no softmaxes, and a window that differs by layer is a traced number.
        if self.global_tokens or self.dilated_heads or not self.one_window:
            report(PART, "bands of blocks, for global tokens, dilation or windows that differ by layer")
            return None
        mask, scale = (context.key_span(self.largest), context.structure(self.largest)), 1 / math.sqrt(q.shape[-1])
        return softmax_by_library(self.implementation, q, k, v, *mask, scale=scale, otherwise="bands of blocks")

    def _near(
        self, by: WindowInputs, k: jax.Array, v: jax.Array, key_span: Callable[[jax.Array], KeySpan]
    ) -> SoftmaxPart:
        """Softmax over the sliding window; `key_span`: window -> what the queries see."""
        q = by.pair.q_BxHxLxK.astype(k.dtype)
        batch, heads, length, width = q.shape
        undilated = heads - self.dilated_heads
        attend = functools.partial(ops.windowed_softmax, scale=1 / math.sqrt(width), window=self.largest)

        # A dilated window is a plain window on sequences of every n-th token.
        def attend_dilated(dilation: int) -> SoftmaxPart:
            seen = ops.fold_key_span(key_span((by.window - 1) * dilation + 1), dilation, batch)
            folded_q, folded_k, folded_v = (ops.fold_dilation(x[:, undilated:], dilation) for x in (q, k, v))
            out, log_sum = attend(folded_q, folded_k, folded_v, seen)
            log_sum = ops.unfold_dilation(log_sum[..., None], dilation, length)[..., 0]
            return SoftmaxPart(ops.unfold_dilation(out, dilation, length), log_sum)

        # Heads without dilation come first; all layers of a stack share the code, so the dilation is a switch.
        groups = []
        if undilated:
            groups.append(attend(q[:, :undilated], k[:, :undilated], v[:, :undilated], key_span(by.window)))
        if self.dilated_heads:
            groups.append(jax.lax.switch(by.stage, [functools.partial(attend_dilated, gap) for gap in self.dilations]))
        return SoftmaxPart(*(jnp.concatenate(parts, axis=1) for parts in zip(*groups, strict=True)))

    def _over(self, q: jax.Array, k: jax.Array, v: jax.Array, key_span: KeySpan) -> SoftmaxPart:
        """Softmax over all keys that are seen."""
        return ops.banded_softmax(q.astype(k.dtype), k, v, key_span, scale=1 / math.sqrt(q.shape[-1]), window=None)

    def _split(self, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The values of the window, and those of global attention."""
        width = v.shape[-1] // 2 if self.global_tokens else v.shape[-1]
        return v[..., :width], v[..., width:]


class LongformerAttention(AttentionSublayer[WindowInputs]):
    """Multi-head sliding-window attention with global tokens, which have separate projections (section 3.1)."""

    core: WindowCore

    def __init__(
        self,
        config: ModelConfig,
        options: WindowOptions,
        quadratic: QuadraticOptions,
        convolution: ConvolutionOptions,
        *,
        rngs: nnx.Rngs,
    ):
        """H heads of width K."""
        dim, joined, layers = config.model_dim, config.num_heads * config.head_width, range(config.num_layers)
        most = max(config.max_length, options.size)
        # Of all layers of the model, from the first.
        self.windows = tuple(min(round(options.size * options.growth**n), most) for n in layers)
        self.gaps = tuple(options.dilations[n * len(options.dilations) // len(layers)] for n in layers)
        self.rotary = bool(config.rotary)
        self.heads = self.key_heads = config.num_heads
        self.key_width = self.value_width = config.head_width
        # One core for all layers: its blocks and its ring suit the largest window.
        self.core = WindowCore(config, options, quadratic.implementation, self.windows)
        # Global attention has separate projections.
        self.names = ("query", "key", "value")
        if options.global_tokens:
            self.names += ("global_query", "global_key", "global_value")
        for name in self.names:
            setattr(self, name, Dense(dim, joined, config, rngs=rngs, biased=QUERY_KEY_VALUE))
        self.query_norm, self.key_norm = query_key_norms(config, self.key_width)
        if options.global_tokens:
            self.global_query_norm, self.global_key_norm = query_key_norms(config, self.key_width)
        self.output = Output(joined, dim, config, rngs=rngs)
        self.convolutions = short_convolutions(dict.fromkeys(self.names, joined), config, convolution)
        self.projection_weights = (len(self.names) + 1) * dim * joined
        # Those of the first layer, unless a stack says which layers these are.
        first = self.layer_arrays(np.zeros(1, np.int32))
        self.window, self.stage = (LayerArray(first[name][0]) for name in ("window", "stage"))

    def layer_arrays(self, numbers_N: np.ndarray) -> dict[str, jax.Array]:
        """Windows and dilations."""
        self.core.layers = tuple((self.windows[n], self.gaps[n]) for n in numbers_N)
        layer_windows, layer_gaps = zip(*self.core.layers, strict=True)
        stages = [self.core.dilations.index(gap) for gap in layer_gaps]
        return {"window": jnp.asarray(layer_windows, jnp.int32), "stage": jnp.asarray(stages, jnp.int32)}

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Queries, keys and values; with global tokens also those of global attention."""
        return {name: getattr(self, name)(x_BxLxD) for name in self.names}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[WindowInputs]:
        """Splits heads, normalises and rotates queries and keys."""
        # Global attention has separate projections; its values follow the others in the last axis.
        q, k, v, *of_global = (split_heads(x, self.heads) for x in maps.values())
        pairs = {"window": Pair(apply_qk_norm(q, self.query_norm), apply_qk_norm(k, self.key_norm))}
        if of_global:
            global_q, global_k, global_v = of_global
            pairs["global"] = Pair(
                apply_qk_norm(global_q, self.global_query_norm), apply_qk_norm(global_k, self.global_key_norm)
            )
            v = jnp.concatenate([v, global_v], axis=-1)
        pairs = self.rotate_pairs(pairs, context)
        return Projected(WindowInputs(pairs["window"], pairs.get("global"), self.window[...], self.stage[...]), v)

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))


def _problems(config: ModelConfig) -> list[str]:
    problems, window = head_problems(config), config[WindowOptions]
    # Dilations are by layer, dilated heads within a layer.
    if len(window.dilations) > config.num_layers:
        problems.append(
            f"model.window.dilations={window.dilations} must be at most model.num_layers={config.num_layers} numbers"
        )
    if window.dilated_heads > config.num_heads:
        problems.append(
            f"model.window.dilated_heads={window.dilated_heads} must be at most model.num_heads={config.num_heads}"
        )
    return problems


WINDOW = SublayerSpec(
    LongformerAttention, (WindowOptions, QuadraticOptions, ConvolutionOptions), MULTI_HEAD_KEYS, problems=_problems
)
ROWS = {
    "longformer": Family(
        (WINDOW, MLP_SPEC),
        {"rotary": True},
        about="sliding-window softmax attention, optionally dilated, and an MLP",
        paper="Beltagy et al. 2020, arXiv:2004.05150",
    )
}
