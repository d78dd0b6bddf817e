"""Attention core over a sliding window, in heads with and without gaps, and over the global tokens."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.config import ModelConfig
from flash_lm.layers.context import Context
from flash_lm.layers.core import Pair, PlainCore
from flash_lm.ops import banded_softmax as ops
from flash_lm.ops.banded_softmax import SoftmaxPart
from flash_lm.ops.cache import write
from flash_lm.ops.compact import compacted
from flash_lm.ops.products import matmul
from flash_lm.ops.ring import (
    Ring,
    after_ring,
    empty_ring,
    last_of,
    positions_in,
    sight_after_ring,
    with_token,
)
from flash_lm.ops.sight import Sight
from flash_lm.schema import at_least, key, section


def _dilations(gaps: tuple) -> str | None:
    good = gaps and all(isinstance(gap, int) and gap > 0 for gap in gaps)
    return None if good else "a tuple of positive whole numbers, such as (1, 1, 2, 4)"


@section("model.window")
class WindowOptions:
    """Options of attention to a sliding window."""

    size: int = key(
        128, "visible tokens in the first layer, the query's own included; bidirectional: each way", at_least(1)
    )
    growth: float = key(
        1.0, "factor of the window's size from each layer to the next, up to model.max_length", at_least(1)
    )
    dilations: tuple = key(
        (1,),
        "places from one visible token to the next in the dilated heads, from the first layers to the last",
        _dilations,
    )
    dilated_heads: int = key(2, "heads that have gaps where model.window.dilations says so", at_least(0))
    global_tokens: int = key(0, "first tokens of each document that all of it sees, whatever the window", at_least(0))


class WindowInputs(NamedTuple):
    """What determines the mixing.

    pair: queries and keys.
    own: those of the global tokens' own attention; None: there are no global tokens.
    window: size of this layer's window, int32.
    stage: index of this layer's dilation in increasing order, int32.
    """

    pair: Pair
    own: Pair | None
    window: jax.Array
    stage: jax.Array


class WindowState(NamedTuple):
    """The last tokens, and the global ones.

    ring: as far as the largest window reaches.
    first: keys, values, own keys and own values of each document's global tokens, B×H×g×K each; or nothing.
    """

    ring: Ring
    first: tuple[jax.Array, ...]


class WindowCore(PlainCore):
    """softmax(q kᵀ / √K) v over the window and the global tokens of the query's document.

    With global tokens, the values of their own attention stand behind the other values, in the last dimension.

    Attributes:
        layers: window and dilation of each layer that this core is stacked over, for counting FLOPs.
    """

    layers: tuple[tuple[int, int], ...]

    def __init__(self, config: ModelConfig, options: WindowOptions, largest: int):
        """A core for windows of at most `largest` tokens."""
        self.largest, self.global_tokens = largest, options.global_tokens
        self.dilations = tuple(sorted(set(options.dilations)))
        self.dilated_heads = 0 if self.dilations == (1,) else options.dilated_heads
        self.state_dtype = jnp.dtype(config.state_dtype)
        gap = self.dilations[-1] if self.dilated_heads else 1
        together = math.lcm(*self.dilations)  # so that the first token after the ring begins each folded row
        self.ring_size = -(-((largest - 1) * gap + 1) // together) * together

    def __call__(self, by: WindowInputs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        assert context.segments is not None
        (q, k), (values, own_values), offsets_BxL = by.pair, self._split(v), context.segments.offsets_BxL
        start_BxL = context.sight().index_BxL - offsets_BxL

        def sight(reach: jax.Array) -> Sight:
            index, first, stop = context.sight(reach)
            return Sight(index, jnp.minimum(jnp.maximum(first, start_BxL + self.global_tokens), stop), stop)

        near = self._near(by, k, values, sight)
        if by.own is None:
            return near.out_BxHxLxE
        is_global_BxL = (offsets_BxL < self.global_tokens) & (context.segments.runs_BxL > 0)
        length = v.shape[2]
        compact = compacted(is_global_BxL, length if context.packed else min(self.global_tokens, length))
        far = self._over(q, compact.take(k), compact.take(values), compact.keys(context.sight()))
        own = self._over(compact.take(by.own.q_BxHxLxK), by.own.k_BxHxLxK, own_values, compact.queries(context.sight()))
        return jnp.where(is_global_BxL[:, None, :, None], compact.put_back(own.out_BxHxLxE), ops.joined([near, far]))

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> WindowState:
        """Without tokens; `capacity` is not used."""
        ring = empty_ring(batch, heads, self.ring_size, key_width, key_width, self.state_dtype)
        none = jnp.zeros((batch, heads, self.global_tokens, key_width), self.state_dtype)
        return WindowState(ring, (none,) * 4 if self.global_tokens else ())

    def prefill(
        self, by: WindowInputs, v: jax.Array, context: Context, state: WindowState
    ) -> tuple[jax.Array, WindowState]:
        """The new tokens attend to those in the ring and to each other."""
        start_B, real_BxL = context.positions_BxL[:, 0], context.real()
        seen = after_ring(state.ring, by.pair.k_BxHxLxK, self._split(v)[0], start_B)

        def sight(reach: jax.Array) -> Sight:
            return sight_after_ring(self.ring_size, start_B, real_BxL, reach, hidden=self.global_tokens)

        assert context.lengths_B is not None
        ring = last_of(seen, self.ring_size, start_B, context.lengths_B)
        near = self._near(by, seen.key_BxHxRxK, seen.value_BxHxRxE, sight)
        return self._with_first(by, v, context, near, WindowState(ring, state.first))

    def step(
        self, by: WindowInputs, v: jax.Array, context: Context, state: WindowState
    ) -> tuple[jax.Array, WindowState]:
        """The new token is written to the ring in place, and attends to all of it."""
        q, k = by.pair
        position_B = context.positions_BxL[:, 0]
        ring = with_token(state.ring, k, self._split(v)[0], position_B, context.real()[:, 0])
        held_BxR = positions_in(ring, position_B)
        back_Bx1xR = (position_B[:, None] - held_BxR)[:, None]
        dilated_H = jnp.arange(q.shape[1]) >= q.shape[1] - self.dilated_heads
        gap_1xHx1 = jnp.where(dilated_H, jnp.asarray(self.dilations, jnp.int32)[by.stage], 1)[None, :, None]
        in_window_BxHxR = (back_Bx1xR % gap_1xHx1 == 0) & (back_Bx1xR <= (by.window - 1) * gap_1xHx1)
        visible_BxHxR = in_window_BxHxR & (held_BxR >= self.global_tokens)[:, None]
        scores = matmul(q.astype(ring.key_BxHxRxK.dtype), ring.key_BxHxRxK, transpose_b=True) / math.sqrt(q.shape[-1])
        near = ops.softmax_of_scores(scores, visible_BxHxR[:, :, None], ring.value_BxHxRxE)
        return self._with_first(by, v, context, near, WindowState(ring, state.first))

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Scores and weighted values of the visible pairs, on average over the layers."""
        first = min(self.global_tokens, length)
        rest = length - first

        def near(window: int, gap: int) -> int:
            further = sum(max(rest - n * gap, 0) for n in range(1, window))
            return rest + further * (1 if causal else 2)

        of_first = first * (first + 1) // 2 if causal else first * length
        pairs = sum(
            (heads - self.dilated_heads) * near(window, 1) + self.dilated_heads * near(window, dilation)
            for window, dilation in self.layers
        )
        return 4 * key_width * (pairs / len(self.layers) + heads * (of_first + rest * first)) / length

    def _with_first(
        self, by: WindowInputs, v: jax.Array, context: Context, near: SoftmaxPart, state: WindowState
    ) -> tuple[jax.Array, WindowState]:
        """Decoding: writes new global tokens to the state, and joins the window with the global tokens."""
        if by.own is None:
            return near.out_BxHxLxE.astype(v.dtype), state
        position_BxL, real_BxL = context.positions_BxL, context.real()
        slot_BxL = jnp.where(real_BxL, position_BxL, self.global_tokens)  # those beyond are dropped
        values, own_values = self._split(v)
        new = (by.pair.k_BxHxLxK, values, by.own.k_BxHxLxK, own_values)
        first = tuple(write(old, x, slot_BxL) for old, x in zip(state.first, new, strict=True))
        stop_BxL = jnp.where(real_BxL, jnp.minimum(position_BxL + 1, self.global_tokens), 0)
        sight = Sight(position_BxL, jnp.zeros_like(stop_BxL), stop_BxL)
        key, value, own_key, own_value = first
        far = self._over(by.pair.q_BxHxLxK, key, value, sight)
        own = self._over(by.own.q_BxHxLxK, own_key, own_value, sight)
        is_global_BxL = position_BxL < self.global_tokens
        out = jnp.where(is_global_BxL[:, None, :, None], own.out_BxHxLxE, ops.joined([near, far]))
        return out.astype(v.dtype), WindowState(state.ring, first)

    def _near(self, by: WindowInputs, k: jax.Array, v: jax.Array, sight: Callable[[jax.Array], Sight]) -> SoftmaxPart:
        """Softmax over the window, where `sight` gives what the queries see of the last so many tokens."""
        q = by.pair.q_BxHxLxK.astype(k.dtype)
        batch, heads, length, width = q.shape
        whole = heads - self.dilated_heads
        attend = functools.partial(ops.windowed_softmax, scale=1 / math.sqrt(width), window=self.largest)

        def with_gaps(dilation: int) -> SoftmaxPart:
            seen = ops.folded_sight(sight((by.window - 1) * dilation + 1), dilation, batch)
            folded_q, folded_k, folded_v = (ops.folded(x[:, whole:], dilation) for x in (q, k, v))
            out, log_sum = attend(folded_q, folded_k, folded_v, seen)
            log_sum = ops.unfolded(log_sum[..., None], dilation, length)[..., 0]
            return SoftmaxPart(ops.unfolded(out, dilation, length), log_sum)

        groups = []
        if whole:
            groups.append(attend(q[:, :whole], k[:, :whole], v[:, :whole], sight(by.window)))
        if self.dilated_heads:
            groups.append(jax.lax.switch(by.stage, [functools.partial(with_gaps, gap) for gap in self.dilations]))
        return SoftmaxPart(*(jnp.concatenate(parts, axis=1) for parts in zip(*groups, strict=True)))

    def _over(self, q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> SoftmaxPart:
        """Softmax over all keys that are seen."""
        return ops.banded_softmax(q.astype(k.dtype), k, v, sight, scale=1 / math.sqrt(q.shape[-1]), window=None)

    def _split(self, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The values, and those of the global tokens' own attention."""
        width = v.shape[-1] // 2 if self.global_tokens else v.shape[-1]
        return v[..., :width], v[..., width:]
