"""Mixed chunk attention from a state of constant size: the current chunk's keys and values, and Σ kᵀv of those before.

Row b of the batch stands at position start[b], hence at place start[b] % C of its chunk. A chunk is folded into the sum
as soon as its last token is there; what the buffers hold at and after a row's place is old and never looked at.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.mixed_chunk_attention import global_attention, local_attention
from flash_lm.ops.products import matmul


class ChunkState(NamedTuple):
    """Decode state of one layer; its size depends on neither the position nor the longest length."""

    local_key_BxHxCxK: jax.Array
    global_key_BxHxCxK: jax.Array
    value_BxHxCxE: jax.Array
    sum_BxHxKxE: jax.Array  # float32


class Projections(NamedTuple):
    """What mixed chunk attention mixes: queries and keys, B×H×L×K each, of the parts that are on; values B×H×L×E."""

    local: tuple[jax.Array, jax.Array] | None
    global_: tuple[jax.Array, jax.Array] | None
    v_BxHxLxE: jax.Array


class Settings(NamedTuple):
    """How chunks are mixed; the divisors are the constants N of the two parts, None: the number of visible keys."""

    chunk_size: int
    function: str
    scale: float
    bias_CxRxC: jax.Array | None  # R = 1 to decode
    local_divisor: int | None
    global_divisor: int | None


def init_chunk_state(batch: int, heads: int, chunk_size: int, key_width: int, value_width: int, dtype) -> ChunkState:
    """The state before the first token."""
    key = jnp.zeros((batch, heads, chunk_size, key_width), dtype)
    value = jnp.zeros((batch, heads, chunk_size, value_width), dtype)
    return ChunkState(key, key, value, jnp.zeros((batch, heads, key_width, value_width), jnp.float32))


def fold(x_BxHx: jax.Array) -> jax.Array:
    """B×H×… -> N×…, N = B·H."""
    return x_BxHx.reshape(-1, *x_BxHx.shape[2:])


def prefill_chunks(
    x: Projections, state: ChunkState, start_B: jax.Array, lengths_B: jax.Array, settings: Settings
) -> tuple[jax.Array, ChunkState]:
    """Consumes lengths[b] tokens of each row, from anywhere in a chunk.

    Each row is shifted to its place in the chunk grid, after what its buffers hold; the parallel form does the rest.

    Args:
        x: of the new tokens; those at lengths[b] and after are ignored.
        state: before them.
        start_B: position of each row's first new token.
        lengths_B: number of new tokens, 0 … L.
        settings: of the layer.

    Returns:
        B×H×L×E, and the state after the new tokens.
    """
    batch, heads, length = x.v_BxHxLxE.shape[:3]
    chunk_size = settings.chunk_size
    grid = chunk_size * (1 + -(-length // chunk_size))
    place_B = start_B % chunk_size
    index_1xT = jnp.arange(grid, dtype=jnp.int32)[None]
    source_BxT = index_1xT - place_B[:, None]
    old_BxT, new_BxT = source_BxT < 0, (source_BxT >= 0) & (source_BxT < lengths_B[:, None])
    runs_NxT = jnp.repeat((old_BxT | new_BxT).astype(jnp.int32), heads, axis=0)
    chunk_B = (place_B + lengths_B) // chunk_size  # on the grid, the chunk in which each row ends up
    rows_B = jnp.arange(batch)

    def on_grid(new_BxHxLx: jax.Array) -> jax.Array:
        taken_BxHxTx = jnp.take_along_axis(new_BxHxLx, source_BxT.clip(0, length - 1)[:, None, :, None], axis=2)
        return jnp.where(new_BxT[:, None, :, None], taken_BxHxTx, 0)

    def after_old(new_BxHxLx: jax.Array, old_BxHxCx: jax.Array) -> jax.Array:
        old_BxHxTx = jnp.pad(old_BxHxCx, ((0, 0), (0, 0), (0, grid - chunk_size), (0, 0)))
        return jnp.where(old_BxT[:, None, :, None], old_BxHxTx.astype(new_BxHxLx.dtype), on_grid(new_BxHxLx))

    def current_chunk(x_BxHxTx: jax.Array, old_BxHxCx: jax.Array) -> jax.Array:
        chunks_BxHxGxCx = x_BxHxTx.reshape(batch, heads, -1, *old_BxHxCx.shape[2:])
        return chunks_BxHxGxCx[rows_B, :, chunk_B].astype(old_BxHxCx.dtype)

    local_key, global_key, value, total = state
    v_BxHxTxE = after_old(x.v_BxHxLxE, value)
    out_BxHxTxE = jnp.zeros_like(v_BxHxTxE)
    if x.local is not None:
        q_BxHxLxK, k_BxHxLxK = x.local
        k_BxHxTxK = after_old(k_BxHxLxK, local_key)
        count_1xT = index_1xT % chunk_size + 1
        if settings.local_divisor is not None:
            count_1xT = jnp.full_like(count_1xT, settings.local_divisor)
        out_BxHxTxE += local_attention(
            fold(on_grid(q_BxHxLxK)),
            fold(k_BxHxTxK),
            fold(v_BxHxTxE),
            runs_NxT,
            chunk_size=chunk_size,
            causal=True,
            function=settings.function,
            scale=settings.scale,
            divisor_BxL=count_1xT.astype(jnp.float32),
            bias_CxRxC=settings.bias_CxRxC,
        ).reshape(out_BxHxTxE.shape)
        local_key = current_chunk(k_BxHxTxK, local_key)
    if x.global_ is not None:
        q_BxHxLxK, k_BxHxLxK = x.global_
        k_BxHxTxK = after_old(k_BxHxLxK, global_key)
        earlier_BxT = (start_B - place_B)[:, None] + index_1xT - index_1xT % chunk_size
        out_NxTxE, entering_NxGxKxE = global_attention(
            fold(on_grid(q_BxHxLxK)),
            fold(k_BxHxTxK),
            fold(v_BxHxTxE),
            runs_NxT,
            chunk_size=chunk_size,
            weight_BxL=jnp.repeat(_weight(earlier_BxT, settings.global_divisor), heads, axis=0),
            initial_NxKxE=fold(total),
        )
        out_BxHxTxE += out_NxTxE.reshape(out_BxHxTxE.shape)
        global_key = current_chunk(k_BxHxTxK, global_key)
        total = entering_NxGxKxE.reshape(batch, heads, *entering_NxGxKxE.shape[1:])[rows_B, :, chunk_B]
    target_BxL = place_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    out_BxHxLxE = jnp.take_along_axis(out_BxHxTxE, target_BxL[:, None, :, None], axis=2)
    return out_BxHxLxE, ChunkState(local_key, global_key, current_chunk(v_BxHxTxE, value), total)


def step_chunks(
    x: Projections, state: ChunkState, position_B: jax.Array, settings: Settings
) -> tuple[jax.Array, ChunkState]:
    """One token a row, at L = 1; arguments and results as in `prefill_chunks`."""
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
        weight_Bx1 = _weight((position_B - place_B)[:, None], settings.global_divisor)
        query = q_BxHx1xK * weight_Bx1[:, None, :, None].astype(q_BxHx1xK.dtype)
        out_BxHx1xE += matmul(query, total.astype(value.dtype)).astype(value.dtype)
        full_B = place_B == settings.chunk_size - 1

        def fold_chunk(total: jax.Array) -> jax.Array:
            chunk_BxHxKxE = matmul(global_key, value, transpose_a=True)
            return total + jnp.where(full_B[:, None, None, None], chunk_BxHxKxE, 0)

        total = jax.lax.cond(full_B.any(), fold_chunk, lambda total: total, total)
    return out_BxHx1xE, ChunkState(local_key, global_key, value, total)


def _attend_buffer(q_BxHx1xK, key_BxHxCxK, value_BxHxCxE, place_B, settings: Settings) -> jax.Array:
    """Local attention of one query a row over the tokens of its chunk up to its place."""
    scores_BxHx1xC = matmul(q_BxHx1xK, key_BxHxCxK.astype(q_BxHx1xK.dtype), transpose_b=True) * settings.scale
    if settings.bias_CxRxC is not None:
        scores_BxHx1xC += settings.bias_CxRxC[place_B][:, None]
    visible_BxC = jnp.arange(settings.chunk_size)[None] <= place_B[:, None]
    count_B = place_B + 1 if settings.local_divisor is None else jnp.full_like(place_B, settings.local_divisor)
    weights_BxHx1xC = ATTENTION_FUNCTIONS[settings.function](
        scores_BxHx1xC, visible_BxC[:, None, None], count_B.astype(jnp.float32)[:, None, None, None]
    )
    return matmul(weights_BxHx1xC.astype(value_BxHxCxE.dtype), value_BxHxCxE).astype(value_BxHxCxE.dtype)


def _weight(earlier_BxL: jax.Array, divisor: int | None) -> jax.Array:
    """1 / N of the global part, zero where no chunk came before."""
    n_BxL = jnp.full_like(earlier_BxL, divisor) if divisor else jnp.maximum(earlier_BxL, 1)
    return jnp.where(earlier_BxL > 0, 1 / n_BxL.astype(jnp.float32), 0)
