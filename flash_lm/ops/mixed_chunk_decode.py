"""Decoding of mixed chunk attention: a KV cache of near chunks, and the state Σ kᵀv of earlier ones.

Sequence b of the batch is at position start[b], that is, at index start[b] % C of its chunk. A chunk is added to the
sum when its last token is known: by `prefill_chunks` at once, by `flush_chunks` after `step_chunks`. `ops.chunk_grid`
says where tokens are in the buffers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.chunk_grid import ChunkGrid
from flash_lm.ops.matmul import matmul
from flash_lm.ops.mixed_chunk_attention import global_attention, heads_into_batch, local_attention
from flash_lm.ops.normalizer import Normalizer
from flash_lm.ops.visibility import is_between


class ChunkState(NamedTuple):
    """Decode state of one layer; its size is constant.

    Keys, and the sum with them, have width 0 if their part is off. M is C, or 2C if chunks overlap.
    """

    local_key_BxHxMxK: jax.Array
    global_key_BxHxCxK: jax.Array
    value_BxHxMxE: jax.Array
    sum_BxHxKxE: jax.Array  # float32


class Projections(NamedTuple):
    """Inputs of mixed chunk attention: queries and keys, B×H×L×K each, of the parts that are on; values B×H×L×E."""

    local: tuple[jax.Array, jax.Array] | None
    global_: tuple[jax.Array, jax.Array] | None
    v_BxHxLxE: jax.Array


class Settings(NamedTuple):
    """Settings of a layer's mixed chunk attention."""

    chunk_size: int
    reach: tuple[int, ...]  # the chunks that a query sees, relative to that of the query
    function: str
    normalizer: Normalizer
    bias_CxRxC: jax.Array | None

    @property
    def span(self) -> int:
        """M, tokens in these chunks."""
        return len(self.reach) * self.chunk_size

    def scale(self, width: int) -> float:
        """Factor of the scores of queries and keys of this width."""
        return self.normalizer.scale_in_chunk(width, self.span, self.function)

    def weight_of_sum(self, earlier_BxL: jax.Array) -> jax.Array:
        """1 / N of the global part, zero if no chunk came before; takes the number of tokens in earlier chunks."""
        return jnp.where(earlier_BxL > 0, 1 / self.normalizer.of_sum(earlier_BxL, 0), 0)


def init_chunk_state(
    batch: int, heads: int, chunk_size: int, held: int, key_widths: tuple[int, int], value_width: int, dtype: jnp.dtype
) -> ChunkState:
    """The state before the first token.

    Args:
        batch: B.
        heads: H.
        chunk_size: C.
        held: chunks that local attention sees, M / C.
        key_widths: of the local and the global part, 0 for one that is off.
        value_width: E.
        dtype: of keys and values.
    """
    zeros = lambda chunks, width: jnp.zeros((batch, heads, chunks * chunk_size, width), dtype)
    total = jnp.zeros((batch, heads, key_widths[1], value_width), jnp.float32)
    return ChunkState(zeros(held, key_widths[0]), zeros(1, key_widths[1]), zeros(held, value_width), total)


def prefill_chunks(
    x: Projections, state: ChunkState, start_B: jax.Array, lengths_B: jax.Array, settings: Settings
) -> tuple[jax.Array, ChunkState]:
    """Consumes lengths[b] tokens of each sequence, from anywhere in a chunk.

    Each sequence is aligned with the chunk grid, after the tokens in its buffers; the parallel form does the rest.

    Args:
        x: projections of the new tokens; those at lengths[b] and after are ignored.
        state: state before these tokens.
        start_B: position of the first new token of each sequence.
        lengths_B: number of new tokens, 0 … L.
        settings: settings of the layer.

    Returns:
        B×H×L×E, and the state after the new tokens.
    """
    heads, length = x.v_BxHxLxE.shape[1:3]
    for_heads = lambda x_BxT: jnp.repeat(x_BxT, heads, axis=0)
    # Grids of the buffers: local attention sees `held` chunks, global attention needs the current one.
    held = len(settings.reach)
    near, chunk = (ChunkGrid(settings.chunk_size, chunks, length, start_B, lengths_B) for chunks in (held, 1))
    local_key, global_key, value, total = state
    v_BxHxTxE = near.put_after(value, x.v_BxHxLxE)
    out_BxHxLxE = jnp.zeros_like(x.v_BxHxLxE)
    if x.local is not None:
        # Local attention over the cached and the new tokens.
        q_BxHxLxK, k_BxHxLxK = x.local
        k_BxHxTxK, key_span = near.put_after(local_key, k_BxHxLxK), near.key_span()
        seen_BxT = key_span.clip_to_chunks(settings.chunk_size, settings.reach).count()
        out_NxTxE = local_attention(
            heads_into_batch(near.put(q_BxHxLxK)),
            heads_into_batch(k_BxHxTxK),
            heads_into_batch(v_BxHxTxE),
            key_span,
            chunk_size=settings.chunk_size,
            function=settings.function,
            scale=settings.scale(q_BxHxLxK.shape[-1]),
            divisor_BxL=settings.normalizer.in_chunk(seen_BxT, settings.span),
            bias_CxRxC=settings.bias_CxRxC,
            reach=settings.reach,
        )
        out_BxHxLxE += near.take(out_NxTxE.reshape(v_BxHxTxE.shape))
        local_key = near.take_last(k_BxHxTxK, local_key.dtype)
    if x.global_ is not None:
        # Global attention: the state, plus the chunks that the new tokens complete.
        q_BxHxLxK, k_BxHxLxK = x.global_
        k_BxHxTxK = chunk.put_after(global_key, k_BxHxLxK)
        chunk_v_BxHxTxE = v_BxHxTxE[:, :, (held - 1) * settings.chunk_size :]
        out_NxTxE, entering_NxGxKxE = global_attention(
            heads_into_batch(chunk.put(q_BxHxLxK)),
            heads_into_batch(k_BxHxTxK),
            heads_into_batch(chunk_v_BxHxTxE),
            for_heads(chunk.real_BxT.astype(jnp.int32)),
            chunk_size=settings.chunk_size,
            weight_BxL=for_heads(settings.weight_of_sum(chunk.earlier_BxT)),
            initial_NxKxE=heads_into_batch(total),
            sums_dtype=jnp.float32,
        )
        out_BxHxLxE += chunk.take(out_NxTxE.reshape(chunk_v_BxHxTxE.shape))
        global_key = chunk.take_last(k_BxHxTxK, global_key.dtype)
        total = chunk.take_last_chunk(entering_NxGxKxE.reshape(-1, heads, *entering_NxGxKxE.shape[1:]))
    value = near.take_last(v_BxHxTxE, value.dtype)
    return out_BxHxLxE, ChunkState(local_key, global_key, value, total)


def step_chunks(
    x: Projections, state: ChunkState, position_B: jax.Array, settings: Settings
) -> tuple[jax.Array, ChunkState]:
    """Recurrent form, one token per sequence, L = 1; see `prefill_chunks`. A full chunk is not in the state yet."""
    rows_B = jnp.arange(position_B.size)

    def write(buffer_BxHxMx: jax.Array, new_BxHx1x: jax.Array) -> jax.Array:
        slot_B = position_B % buffer_BxHxMx.shape[2]
        return buffer_BxHxMx.at[rows_B, :, slot_B].set(new_BxHx1x[:, :, 0].astype(buffer_BxHxMx.dtype))

    local_key, global_key, value, total = state
    value = write(value, x.v_BxHxLxE)
    out_BxHx1xE = jnp.zeros_like(x.v_BxHxLxE)
    if x.local is not None:
        # Local attention over the KV cache of near chunks.
        q_BxHx1xK, k_BxHx1xK = x.local
        local_key = write(local_key, k_BxHx1xK)
        out_BxHx1xE += _attend_buffer(q_BxHx1xK, local_key, value, position_B, settings)
    if x.global_ is not None:
        # Global attention reads the state of complete chunks; `flush_chunks` adds a chunk to it.
        q_BxHx1xK, k_BxHx1xK = x.global_
        global_key = write(global_key, k_BxHx1xK)
        weight_Bx1 = settings.weight_of_sum((position_B - position_B % settings.chunk_size)[:, None])
        query = q_BxHx1xK * weight_Bx1[:, None, :, None].astype(q_BxHx1xK.dtype)
        out_BxHx1xE += matmul(query, total.astype(query.dtype)).astype(query.dtype)
    return out_BxHx1xE, ChunkState(local_key, global_key, value, total)


def flush_chunks(state: ChunkState, position_B: jax.Array, chunk_size: int) -> ChunkState:
    """Adds the chunks that the last step has completed to the state; `position_B`: tokens consumed per sequence."""
    full_B = (position_B > 0) & (position_B % chunk_size == 0)

    def add_chunk(total: jax.Array) -> jax.Array:
        value_BxHxCxE = state.value_BxHxMxE
        if value_BxHxCxE.shape[2] > chunk_size:  # the complete chunk is the last one in the buffer
            slot_BxC = (position_B[:, None] - chunk_size + jnp.arange(chunk_size)[None]) % value_BxHxCxE.shape[2]
            value_BxHxCxE = jnp.take_along_axis(value_BxHxCxE, slot_BxC[:, None, :, None], axis=2)
        chunk_BxHxKxE = matmul(state.global_key_BxHxCxK, value_BxHxCxE, transpose_a=True)
        return total + jnp.where(full_B[:, None, None, None], chunk_BxHxKxE, 0)

    return state._replace(sum_BxHxKxE=jax.lax.cond(full_B.any(), add_chunk, lambda total: total, state.sum_BxHxKxE))


def _attend_buffer(q_BxHx1xK, key_BxHxMxK, value_BxHxMxE, position_B, settings: Settings) -> jax.Array:
    """Local attention of one query per sequence over the chunks that it sees, up to itself."""
    size, span = settings.chunk_size, settings.span
    scores_BxHx1xM = matmul(q_BxHx1xK, key_BxHxMxK.astype(q_BxHx1xK.dtype), transpose_b=True)
    scores_BxHx1xM *= settings.scale(q_BxHx1xK.shape[-1])
    # The position of the token in each slot, and its index from the start of the first visible chunk.
    slot_1xM = jnp.arange(span, dtype=jnp.int32)[None]
    first_Bx1 = (position_B - position_B % size + min(settings.reach) * size)[:, None]
    index_BxM = (slot_1xM - first_Bx1) % span
    if settings.bias_CxRxC is not None:
        bias_BxM = settings.bias_CxRxC.reshape(size, span)[position_B % size]
        scores_BxHx1xM += jnp.take_along_axis(bias_BxM, index_BxM, axis=1)[:, None, None]
    position_BxM = first_Bx1 + index_BxM
    visible_BxM = is_between(jnp.maximum(first_Bx1, 0), position_BxM, position_B[:, None] + 1)
    # N counts the visible tokens, as in the parallel form.
    divisor_Bx1 = settings.normalizer.in_chunk(visible_BxM.sum(axis=1, keepdims=True, dtype=jnp.int32), span)
    weights_BxHx1xM = ATTENTION_FUNCTIONS[settings.function](
        scores_BxHx1xM, visible_BxM[:, None, None], divisor_Bx1[:, None, :, None]
    )
    return matmul(weights_BxHx1xM.astype(value_BxHxMxE.dtype), value_BxHxMxE).astype(q_BxHx1xK.dtype)
