"""Linear attention whose sum decays on its way: S ← e^g S + kᵀ v, o = q S, with a g ≤ 0 for each head and token.

In chunks, as in "Transformers are SSMs" (Dao and Gu 2024, section 6): pair by pair inside a chunk,
(q kᵀ ⊙ e^(b_i − b_j)) v with b the running sum of g, and through a sum over the chunks before it. All factors are at
most 1. Sums are float32, and start again with each document: by masks, not by a g of −∞, whose differences are NaN.
There is no denominator.
"""

import functools

import jax
import jax.numpy as jnp

from flash_lm.ops.chunks import entering_runs, from_chunks, sums_before, to_chunks
from flash_lm.ops.log_decay import Running, decayed, running
from flash_lm.ops.products import matmul


def decayed_sums(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    log_decay_BxHxL: jax.Array,
    runs_BxL: jax.Array,
    *,
    chunk_size: int,
) -> jax.Array:
    """Σ_j e^(g_j+1 + … + g_i) (q_i·k_j) v_j over the tokens of the query's document up to itself.

    What is held for the derivative is the input and a sum for each chunk.

    Args:
        q_BxHxLxK: queries.
        k_BxHxLxK: keys.
        v_BxHxLxE: values.
        log_decay_BxHxL: g, not positive, (B or 1)×H×(L or 1) float32; one below −80 counts as −80.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        chunk_size: C.

    Returns:
        B×H×L×E, dtype of v.
    """
    return _decayed(q_BxHxLxK, k_BxHxLxK, v_BxHxLxE, log_decay_BxHxL, runs_BxL, chunk_size, None)[0]


def prefill_decayed(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    log_decay_BxHxL: jax.Array,
    state_BxHxKxE: jax.Array,
    real_BxL: jax.Array,
    *,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """As `decayed_sums`, for tokens that continue a state.

    Args:
        q_BxHxLxK: queries.
        k_BxHxLxK: keys.
        v_BxHxLxE: values.
        log_decay_BxHxL: g, not positive, (B or 1)×H×(L or 1) float32.
        state_BxHxKxE: S after the tokens before these, float32.
        real_BxL: which tokens are not padding; padding is at the end.
        chunk_size: C.

    Returns:
        B×H×L×E, dtype of v; and S after the real tokens.
    """
    real = real_BxL[:, None]
    # Padding leaves the state as it is. Beyond the last position it may be NaN, and zero times NaN is NaN.
    q, k, v = (jnp.where(real[..., None], x, 0) for x in (q_BxHxLxK, k_BxHxLxK, v_BxHxLxE))
    log_decay = jnp.where(real, log_decay_BxHxL, 0)
    return _decayed(q, k, v, log_decay, jnp.ones_like(real_BxL, jnp.int32), chunk_size, state_BxHxKxE)


def step_decayed(
    q_BxHx1xK: jax.Array, k_BxHx1xK: jax.Array, v_BxHx1xE: jax.Array, log_decay_BxHx1: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: B×H×1×E, dtype of v; and the state after it, B×H×K×E float32."""
    new = matmul(*(x.astype(jnp.float32) for x in (k_BxHx1xK, v_BxHx1xE)), transpose_a=True)
    state = jnp.exp(log_decay_BxHx1.astype(jnp.float32))[..., None] * state + new
    return matmul(q_BxHx1xK.astype(jnp.float32), state).astype(v_BxHx1xE.dtype), state


def _decayed(q, k, v, log_decay, runs_BxL, chunk_size: int, initial) -> tuple[jax.Array, jax.Array]:
    """The output, and the sum after the last chunk, which is that of the row if its padding does not decay."""
    length = v.shape[2]
    size = min(chunk_size, length)
    q, k, v = (_to_chunks(x, size) for x in (q, k, v))
    one_for_all = log_decay.shape[2] == 1
    logs = _to_chunks(jnp.broadcast_to(log_decay, (*log_decay.shape[:2], size)) if one_for_all else log_decay, size)
    sums = running(logs)
    # What fills the last chunk counts as more of the row's last document: its queries and keys are zeros.
    runs_Bx1xGxC = to_chunks(jnp.pad(runs_BxL, ((0, 0), (0, -length % size)), mode="edge"), size)[:, None]
    last_Bx1xGx1 = runs_Bx1xGxC[..., -1:]
    entering_Bx1xGx1 = entering_runs(last_Bx1xGx1[:, 0, :, 0])[:, None, :, None]

    end = sums.at(lambda x: x[..., -1:])
    of_last = (runs_Bx1xGxC == last_Bx1xGx1) & (runs_Bx1xGxC > 0)
    own = _weighted(k, decayed(end, sums, of_last))
    own_BxHxGxKxE = matmul(own, v, transpose_a=True)
    through_BxHxG = jnp.broadcast_to(end.total()[..., 0], own_BxHxGxKxE.shape[:3])
    entering = _entering(own_BxHxGxKxE, through_BxHxG, last_Bx1xGx1, initial)
    of_entering = (runs_Bx1xGxC == entering_Bx1xGx1) & (runs_Bx1xGxC > 0)
    read = _weighted(q, decayed(sums, sums.at(jnp.zeros_like), of_entering))
    out = matmul(read, entering.astype(read.dtype)) + _inside(q, k, v, sums, runs_Bx1xGxC)
    last = jnp.exp(through_BxHxG[..., -1])[..., None, None] * entering[:, :, -1]
    goes_on = (last_Bx1xGx1 == entering_Bx1xGx1)[:, :, -1:]
    return _from_chunks(out.astype(v.dtype), length), jnp.where(goes_on, last, 0) + own_BxHxGxKxE[:, :, -1]


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
def _inside(q, k, v, sums: Running, runs_Bx1xGxC: jax.Array) -> jax.Array:
    """(q kᵀ ⊙ e^(b_i − b_j)) v over pairs inside the chunk, float32; the derivative computes its weights again."""
    size = v.shape[-2]
    same = (runs_Bx1xGxC[..., :, None] == runs_Bx1xGxC[..., None, :]) & (runs_Bx1xGxC > 0)[..., None]
    visible = same & jnp.tri(size, dtype=bool)[None, None, None]
    weights = decayed(sums.at(lambda x: x[..., :, None]), sums.at(lambda x: x[..., None, :]), visible)
    return matmul((matmul(q, k, transpose_b=True) * weights).astype(v.dtype), v)


def _entering(own_BxHxGxKxE, through_BxHxG, last_Bx1xGx1, initial) -> jax.Array:
    """The sum that enters each chunk, B×H×G×K×E float32."""
    batch, heads, chunks = own_BxHxGxKxE.shape[:3]
    last_NxG = jnp.broadcast_to(last_Bx1xGx1[..., 0], (batch, heads, chunks)).reshape(-1, chunks)
    fold = lambda x: x.reshape(-1, *x.shape[2:])
    initial = None if initial is None else fold(initial)
    return sums_before(fold(own_BxHxGxKxE), last_NxG, initial, fold(through_BxHxG)).reshape(own_BxHxGxKxE.shape)


def _weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
    return (x * weight[..., None]).astype(x.dtype)


def _to_chunks(x_BxHxLx: jax.Array, size: int) -> jax.Array:
    """B×H×L×… -> B×H×G×C×…."""
    batch, heads = x_BxHxLx.shape[:2]
    chunked = to_chunks(x_BxHxLx.reshape(-1, *x_BxHxLx.shape[2:]), size)
    return chunked.reshape(batch, heads, *chunked.shape[1:])


def _from_chunks(x_BxHxGxCxE: jax.Array, length: int) -> jax.Array:
    batch, heads = x_BxHxGxCxE.shape[:2]
    whole = from_chunks(x_BxHxGxCxE.reshape(-1, *x_BxHxGxCxE.shape[2:]), length)
    return whole.reshape(batch, heads, *whole.shape[1:])
