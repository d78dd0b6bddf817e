"""Mixed chunk attention from a state of constant size: the current chunk's keys and values, and Σ kᵀv of those before.

Row b of the batch stands at position start[b], hence at place start[b] % C of its chunk. A chunk is folded into the sum
as soon as its last token is there; what the buffers hold at and after a row's place is old and never looked at.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS
from flash_lm.ops.mixed_chunk_attention import global_attention, local_attention, to_chunks
from flash_lm.ops.products import matmul


class ChunkState(NamedTuple):
    """Decode state of one layer; its size depends on neither the position nor the longest length."""

    local_key_BxHxCxK: jax.Array
    global_key_BxHxCxK: jax.Array
    value_BxHxCxE: jax.Array
    sum_BxHxKxE: jax.Array  # float32


class Projections(NamedTuple):
    """What mixed chunk attention mixes; the local or the global pair is None when that part is switched off."""

    local_q_BxHxLxK: jax.Array | None
    local_k_BxHxLxK: jax.Array | None
    global_q_BxHxLxK: jax.Array | None
    global_k_BxHxLxK: jax.Array | None
    v_BxHxLxE: jax.Array


def init_chunk_state(batch: int, heads: int, chunk_size: int, key_width: int, value_width: int, dtype) -> ChunkState:
    """The state before the first token."""
    key = jnp.zeros((batch, heads, chunk_size, key_width), dtype)
    value = jnp.zeros((batch, heads, chunk_size, value_width), dtype)
    return ChunkState(key, key, value, jnp.zeros((batch, heads, key_width, value_width), jnp.float32))


def fold(x_BxHx: jax.Array) -> jax.Array:
    """B×H×… -> N×…, N = B·H."""
    return x_BxHx.reshape(-1, *x_BxHx.shape[2:])


def prefill_chunks(
    x: Projections,
    state: ChunkState,
    start_B: jax.Array,
    lengths_B: jax.Array,
    *,
    chunk_size: int,
    local: dict,
    local_divisor: int | None,
    global_divisor: int | None,
) -> tuple[jax.Array, ChunkState]:
    """Consumes lengths[b] tokens of each row, from anywhere in a chunk.

    Each row is shifted to its place in the chunk grid, after what its buffers hold; then the parallel form does the rest.

    Args:
        x: of the new tokens; those at lengths[b] and after are ignored.
        state: before them.
        start_B: position of each row's first new token.
        lengths_B: number of new tokens, 0 … L.
        chunk_size: C.
        local: arguments of `local_attention`: function, scale, bias_CxC.
        local_divisor: constant N of the local part; None: the number of visible keys.
        global_divisor: constant N of the global part; None: the number of tokens in earlier chunks.

    Returns:
        B×H×L×E, and the state after the new tokens.
    """
    batch, heads, length = x.v_BxHxLxE.shape[:3]
    grid = chunk_size * (1 + -(-length // chunk_size))
    place_B = start_B % chunk_size
    index_1xT = jnp.arange(grid, dtype=jnp.int32)[None]
    source_BxT = index_1xT - place_B[:, None]
    old_BxT, new_BxT = source_BxT < 0, (source_BxT >= 0) & (source_BxT < lengths_B[:, None])
    runs_BxT = (old_BxT | new_BxT).astype(jnp.int32)

    def on_grid(new_BxHxLx: jax.Array | None, old_BxHxCx: jax.Array | None = None) -> jax.Array | None:
        if new_BxHxLx is None:
            return None
        taken = jnp.take_along_axis(new_BxHxLx, source_BxT.clip(0, length - 1)[:, None, :, None], axis=2)
        taken = jnp.where(new_BxT[:, None, :, None], taken, 0)
        if old_BxHxCx is None:
            return taken
        old = jnp.pad(old_BxHxCx, ((0, 0), (0, 0), (0, grid - chunk_size), (0, 0)))
        return jnp.where(old_BxT[:, None, :, None], old.astype(taken.dtype), taken)

    v_BxHxTxE = on_grid(x.v_BxHxLxE, state.value_BxHxCxE)
    runs_NxT = jnp.repeat(runs_BxT, heads, axis=0)
    out_BxHxTxE = jnp.zeros_like(v_BxHxTxE)
    chunk_B = (place_B + lengths_B) // chunk_size  # on the grid, the chunk in which each row ends up

    def current_chunk(x_BxHxTx: jax.Array | None, old_BxHxCx: jax.Array) -> jax.Array:
        if x_BxHxTx is None:
            return old_BxHxCx
        chunks_BxHxGxCx = to_chunks(fold(x_BxHxTx), chunk_size).reshape(batch, heads, -1, *old_BxHxCx.shape[2:])
        return chunks_BxHxGxCx[jnp.arange(batch), :, chunk_B].astype(old_BxHxCx.dtype)

    local_k = on_grid(x.local_k_BxHxLxK, state.local_key_BxHxCxK)
    if local_k is not None:
        count_1xT = jnp.full_like(index_1xT, local_divisor) if local_divisor else index_1xT % chunk_size + 1
        out_BxHxTxE += local_attention(
            fold(on_grid(x.local_q_BxHxLxK)),
            fold(local_k),
            fold(v_BxHxTxE),
            runs_NxT,
            chunk_size=chunk_size,
            causal=True,
            divisor_BxL=count_1xT.astype(jnp.float32),
            **local,
        ).reshape(out_BxHxTxE.shape)
    global_k, sum_BxHxKxE = on_grid(x.global_k_BxHxLxK, state.global_key_BxHxCxK), state.sum_BxHxKxE
    if global_k is not None:
        earlier_BxT = (start_B - place_B)[:, None] + index_1xT - index_1xT % chunk_size
        out_NxTxE, entering_NxGxKxE = global_attention(
            fold(on_grid(x.global_q_BxHxLxK)),
            fold(global_k),
            fold(v_BxHxTxE),
            runs_NxT,
            chunk_size=chunk_size,
            weight_BxL=_weight(earlier_BxT, global_divisor),
            initial_NxKxE=fold(state.sum_BxHxKxE),
        )
        out_BxHxTxE += out_NxTxE.reshape(out_BxHxTxE.shape)
        entering_BxHxGxKxE = entering_NxGxKxE.reshape(batch, heads, *entering_NxGxKxE.shape[1:])
        sum_BxHxKxE = entering_BxHxGxKxE[jnp.arange(batch), :, chunk_B]
    target_BxL = place_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    out_BxHxLxE = jnp.take_along_axis(out_BxHxTxE, target_BxL[:, None, :, None], axis=2)
    after = ChunkState(
        current_chunk(local_k, state.local_key_BxHxCxK),
        current_chunk(global_k, state.global_key_BxHxCxK),
        current_chunk(v_BxHxTxE, state.value_BxHxCxE),
        sum_BxHxKxE,
    )
    return out_BxHxLxE, after


def step_chunks(
    x: Projections,
    state: ChunkState,
    position_B: jax.Array,
    *,
    chunk_size: int,
    local: dict,
    local_divisor: int | None,
    global_divisor: int | None,
) -> tuple[jax.Array, ChunkState]:
    """One token a row, at L = 1; arguments and results as in `prefill_chunks`."""
    batch, heads = x.v_BxHxLxE.shape[:2]
    place_B = position_B % chunk_size
    rows = jnp.arange(batch)

    def write(buffer_BxHxCx: jax.Array, new_BxHx1x: jax.Array | None) -> jax.Array:
        if new_BxHx1x is None:
            return buffer_BxHxCx
        return buffer_BxHxCx.at[rows, :, place_B].set(new_BxHx1x[:, :, 0].astype(buffer_BxHxCx.dtype))

    local_key = write(state.local_key_BxHxCxK, x.local_k_BxHxLxK)
    global_key = write(state.global_key_BxHxCxK, x.global_k_BxHxLxK)
    value = write(state.value_BxHxCxE, x.v_BxHxLxE)
    out_BxHx1xE = jnp.zeros_like(x.v_BxHxLxE)
    if x.local_q_BxHxLxK is not None:
        out_BxHx1xE += _attend_buffer(
            x.local_q_BxHxLxK, local_key, value, place_B, divisor=local_divisor, chunk_size=chunk_size, **local
        )
    if x.global_q_BxHxLxK is not None:
        weight_Bx1 = _weight((position_B - place_B)[:, None], global_divisor)
        query = x.global_q_BxHxLxK * weight_Bx1[:, None, :, None].astype(x.global_q_BxHxLxK.dtype)
        out_BxHx1xE += matmul(query, state.sum_BxHxKxE.astype(value.dtype)).astype(value.dtype)
    full_B = place_B == chunk_size - 1

    def fold_chunk() -> jax.Array:
        chunk_BxHxKxE = matmul(global_key, value, transpose_a=True)
        return state.sum_BxHxKxE + jnp.where(full_B[:, None, None, None], chunk_BxHxKxE, 0)

    total = state.sum_BxHxKxE
    if x.global_k_BxHxLxK is not None:
        total = jax.lax.cond(full_B.any(), fold_chunk, lambda: state.sum_BxHxKxE)
    return out_BxHx1xE, ChunkState(local_key, global_key, value, total)


def _attend_buffer(q_BxHx1xK, key_BxHxCxK, value_BxHxCxE, place_B, *, divisor, chunk_size, function, scale, bias_CxC):
    """Local attention of one query a row over the tokens of its chunk up to its place."""
    scores_BxHx1xC = matmul(q_BxHx1xK, key_BxHxCxK.astype(q_BxHx1xK.dtype), transpose_b=True) * scale
    if bias_CxC is not None:
        scores_BxHx1xC += bias_CxC[place_B][:, None, None, :]
    visible_BxC = jnp.arange(chunk_size)[None] <= place_B[:, None]
    count_B = jnp.full_like(place_B, divisor) if divisor else place_B + 1
    weights_BxHx1xC = ATTENTION_FUNCTIONS[function](
        scores_BxHx1xC, visible_BxC[:, None, None], count_B.astype(jnp.float32)[:, None, None, None]
    )
    return matmul(weights_BxHx1xC.astype(value_BxHxCxE.dtype), value_BxHxCxE).astype(value_BxHxCxE.dtype)


def _weight(earlier_BxL: jax.Array, divisor: int | None) -> jax.Array:
    """1 / N of the global part, zero where no chunk came before."""
    n_BxL = jnp.full_like(earlier_BxL, divisor) if divisor else jnp.maximum(earlier_BxL, 1)
    return jnp.where(earlier_BxL > 0, 1 / n_BxL.astype(jnp.float32), 0)
