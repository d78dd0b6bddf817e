"""Mixed chunk attention from a state of constant size: the current chunk's keys and values, and Σ kᵀv of earlier ones.

Row b of the batch is at position start[b], that is, at place start[b] % C of its chunk. A chunk is added to the sum
when its last token is known: by `prefill_chunks` at once, by `settle_chunks` after `step_chunks`. The content of the
buffers at and after a row's place is outdated and never read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.mixed_chunk_attention import global_attention, heads_into_batch, local_attention
from flash_lm.ops.normalizer import Normalizer
from flash_lm.ops.products import matmul
from flash_lm.ops.sight import sight_from_start


class ChunkState(NamedTuple):
    """Decode state of one layer; its size does not depend on position or maximum length.

    Keys, and the sum with them, have width 0 if their part is off.
    """

    local_key_BxHxCxK: jax.Array
    global_key_BxHxCxK: jax.Array
    value_BxHxCxE: jax.Array
    sum_BxHxKxE: jax.Array  # float32


class Projections(NamedTuple):
    """Inputs of mixed chunk attention: queries and keys, B×H×L×K each, of the parts that are on; values B×H×L×E."""

    local: tuple[jax.Array, jax.Array] | None
    global_: tuple[jax.Array, jax.Array] | None
    v_BxHxLxE: jax.Array


class Settings(NamedTuple):
    """Settings of a layer's mixed chunk attention."""

    chunk_size: int
    function: str
    normalizer: Normalizer
    bias_CxRxC: jax.Array | None  # R = 1 in decoding

    def scale(self, width: int) -> float:
        """Factor of the scores of queries and keys of this width."""
        return self.normalizer.scale(width, self.chunk_size, self.function)

    def weight_of_sum(self, earlier_BxL: jax.Array) -> jax.Array:
        """1 / N of the global part, zero if no chunk came before; takes the number of tokens in earlier chunks."""
        return jnp.where(earlier_BxL > 0, 1 / self.normalizer.of_sum(earlier_BxL, 0), 0)


def init_chunk_state(
    batch: int, heads: int, chunk_size: int, key_widths: tuple[int, int], value_width: int, dtype: jnp.dtype
) -> ChunkState:
    """The state before the first token; `key_widths`: of the local and the global part, 0 for one that is off."""
    in_chunk = lambda width: jnp.zeros((batch, heads, chunk_size, width), dtype)
    total = jnp.zeros((batch, heads, key_widths[1], value_width), jnp.float32)
    return ChunkState(in_chunk(key_widths[0]), in_chunk(key_widths[1]), in_chunk(value_width), total)


class _Grid:
    """T places from the start of each row's current chunk: the content of its buffers, then the new tokens."""

    def __init__(self, chunk_size: int, length: int, start_B: jax.Array, lengths_B: jax.Array):
        place_B = start_B % chunk_size
        self.chunk_size, self.length = chunk_size, length
        self.size = chunk_size * (1 + -(-length // chunk_size))
        self.index_1xT = jnp.arange(self.size, dtype=jnp.int32)[None]
        self.source_BxT = self.index_1xT - place_B[:, None]  # index of the new token at each place
        self.old_BxT = self.source_BxT < 0
        self.new_BxT = ~self.old_BxT & (self.source_BxT < lengths_B[:, None])
        self.real_BxT = self.old_BxT | self.new_BxT
        # Number of the row's tokens in the chunks before that of each place.
        self.earlier_BxT = (start_B - place_B)[:, None] + self.index_1xT - self.index_1xT % chunk_size
        self.target_BxL = place_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        self.last_chunk_B = (place_B + lengths_B) // chunk_size

    def put(self, new_BxHxLx: jax.Array) -> jax.Array:
        """The new tokens at their places, zeros elsewhere: B×H×T×…."""
        taken_BxHxTx = jnp.take_along_axis(new_BxHxLx, self.source_BxT.clip(0, self.length - 1)[:, None, :, None], 2)
        return jnp.where(self.new_BxT[:, None, :, None], taken_BxHxTx, 0)

    def put_after(self, old_BxHxCx: jax.Array, new_BxHxLx: jax.Array) -> jax.Array:
        """As `put`, preceded by the buffer's tokens."""
        old_BxHxTx = jnp.pad(old_BxHxCx, ((0, 0), (0, 0), (0, self.size - self.chunk_size), (0, 0)))
        return jnp.where(self.old_BxT[:, None, :, None], old_BxHxTx.astype(new_BxHxLx.dtype), self.put(new_BxHxLx))

    def take(self, x_BxHxTx: jax.Array) -> jax.Array:
        """The values at the new tokens: B×H×L×…."""
        return jnp.take_along_axis(x_BxHxTx, self.target_BxL[:, None, :, None], axis=2)

    def take_last_chunk(self, x_BxHxTx: jax.Array, dtype) -> jax.Array:
        """The chunk in which each row ends: B×H×C×…."""
        chunks_BxHxGxCx = x_BxHxTx.reshape(*x_BxHxTx.shape[:2], -1, self.chunk_size, *x_BxHxTx.shape[3:])
        return self.of_last_chunk(chunks_BxHxGxCx).astype(dtype)

    def of_last_chunk(self, x_BxHxGx: jax.Array) -> jax.Array:
        """The value of that chunk: B×H×…."""
        return x_BxHxGx[jnp.arange(self.last_chunk_B.size), :, self.last_chunk_B]


def prefill_chunks(
    x: Projections, state: ChunkState, start_B: jax.Array, lengths_B: jax.Array, settings: Settings
) -> tuple[jax.Array, ChunkState]:
    """Consumes lengths[b] tokens of each row, from anywhere in a chunk.

    Each row is shifted to its place in the chunk grid, after what its buffers hold; the parallel form does the rest.

    Args:
        x: projections of the new tokens; those at lengths[b] and after are ignored.
        state: state before these tokens.
        start_B: position of each row's first new token.
        lengths_B: number of new tokens, 0 … L.
        settings: settings of the layer.

    Returns:
        B×H×L×E, and the state after the new tokens.
    """
    heads, length = x.v_BxHxLxE.shape[1:3]
    grid = _Grid(settings.chunk_size, length, start_B, lengths_B)
    for_heads = lambda x_BxT: jnp.repeat(x_BxT, heads, axis=0)
    local_key, global_key, value, total = state
    v_BxHxTxE = grid.put_after(value, x.v_BxHxLxE)
    out_BxHxTxE = jnp.zeros_like(v_BxHxTxE)
    if x.local is not None:
        q_BxHxLxK, k_BxHxLxK = x.local
        k_BxHxTxK = grid.put_after(local_key, k_BxHxLxK)
        out_BxHxTxE += local_attention(
            heads_into_batch(grid.put(q_BxHxLxK)),
            heads_into_batch(k_BxHxTxK),
            heads_into_batch(v_BxHxTxE),
            sight_from_start(grid.index_1xT, for_heads(grid.real_BxT)),
            chunk_size=settings.chunk_size,
            function=settings.function,
            scale=settings.scale(q_BxHxLxK.shape[-1]),
            divisor_BxL=settings.normalizer.in_chunk(grid.index_1xT % settings.chunk_size + 1, settings.chunk_size),
            bias_CxRxC=settings.bias_CxRxC,
        ).reshape(out_BxHxTxE.shape)
        local_key = grid.take_last_chunk(k_BxHxTxK, local_key.dtype)
    if x.global_ is not None:
        q_BxHxLxK, k_BxHxLxK = x.global_
        k_BxHxTxK = grid.put_after(global_key, k_BxHxLxK)
        out_NxTxE, entering_NxGxKxE = global_attention(
            heads_into_batch(grid.put(q_BxHxLxK)),
            heads_into_batch(k_BxHxTxK),
            heads_into_batch(v_BxHxTxE),
            for_heads(grid.real_BxT.astype(jnp.int32)),
            chunk_size=settings.chunk_size,
            weight_BxL=for_heads(settings.weight_of_sum(grid.earlier_BxT)),
            initial_NxKxE=heads_into_batch(total),
        )
        out_BxHxTxE += out_NxTxE.reshape(out_BxHxTxE.shape)
        global_key = grid.take_last_chunk(k_BxHxTxK, global_key.dtype)
        total = grid.of_last_chunk(entering_NxGxKxE.reshape(-1, heads, *entering_NxGxKxE.shape[1:]))
    value = grid.take_last_chunk(v_BxHxTxE, value.dtype)
    return grid.take(out_BxHxTxE), ChunkState(local_key, global_key, value, total)


def step_chunks(
    x: Projections, state: ChunkState, position_B: jax.Array, settings: Settings
) -> tuple[jax.Array, ChunkState]:
    """One token a row, L = 1; arguments and results as for `prefill_chunks`, but a full chunk is not in the sum yet."""
    place_B = position_B % settings.chunk_size
    rows_B = jnp.arange(place_B.size)

    def write(buffer_BxHxCx: jax.Array, new_BxHx1x: jax.Array) -> jax.Array:
        return buffer_BxHxCx.at[rows_B, :, place_B].set(new_BxHx1x[:, :, 0].astype(buffer_BxHxCx.dtype))

    local_key, global_key, value, total = state
    value = write(value, x.v_BxHxLxE)
    out_BxHx1xE = jnp.zeros_like(x.v_BxHxLxE)
    if x.local is not None:
        q_BxHx1xK, k_BxHx1xK = x.local
        local_key = write(local_key, k_BxHx1xK)
        out_BxHx1xE += _attend_buffer(q_BxHx1xK, local_key, value, place_B, settings)
    if x.global_ is not None:
        q_BxHx1xK, k_BxHx1xK = x.global_
        global_key = write(global_key, k_BxHx1xK)
        weight_Bx1 = settings.weight_of_sum((position_B - place_B)[:, None])
        query = q_BxHx1xK * weight_Bx1[:, None, :, None].astype(q_BxHx1xK.dtype)
        out_BxHx1xE += matmul(query, total.astype(query.dtype)).astype(query.dtype)
    return out_BxHx1xE, ChunkState(local_key, global_key, value, total)


def settle_chunks(state: ChunkState, position_B: jax.Array, chunk_size: int) -> ChunkState:
    """Adds the chunks that the last step has completed to the sums; `position_B`: tokens consumed in each row."""
    full_B = (position_B > 0) & (position_B % chunk_size == 0)

    def add_chunk(total: jax.Array) -> jax.Array:
        chunk_BxHxKxE = matmul(state.global_key_BxHxCxK, state.value_BxHxCxE, transpose_a=True)
        return total + jnp.where(full_B[:, None, None, None], chunk_BxHxKxE, 0)

    return state._replace(sum_BxHxKxE=jax.lax.cond(full_B.any(), add_chunk, lambda total: total, state.sum_BxHxKxE))


def _attend_buffer(q_BxHx1xK, key_BxHxCxK, value_BxHxCxE, place_B, settings: Settings) -> jax.Array:
    """Local attention of one query a row over the tokens of its chunk up to its place."""
    scores_BxHx1xC = matmul(q_BxHx1xK, key_BxHxCxK.astype(q_BxHx1xK.dtype), transpose_b=True)
    scores_BxHx1xC *= settings.scale(q_BxHx1xK.shape[-1])
    if settings.bias_CxRxC is not None:
        scores_BxHx1xC += settings.bias_CxRxC[place_B][:, None]
    sight = sight_from_start(place_B[:, None], jnp.ones((1, 1), bool))
    visible_Bx1xC = sight.visible(jnp.arange(settings.chunk_size, dtype=jnp.int32))
    divisor_Bx1 = settings.normalizer.in_chunk(sight.count(), settings.chunk_size)
    weights_BxHx1xC = ATTENTION_FUNCTIONS[settings.function](
        scores_BxHx1xC, visible_Bx1xC[:, None], divisor_Bx1[:, None, :, None]
    )
    return matmul(weights_BxHx1xC.astype(value_BxHxCxE.dtype), value_BxHxCxE).astype(q_BxHx1xK.dtype)
