"""Linear attention with vector decay (GLA): S_t = diag(e^{g_t}) S_{t−1} + k_tᵀ v_t, o_t = q_t S_t, g_t ≤ 0 per channel.

Chunkwise form ("Gated Linear Attention Transformers with Hardware-Efficient Training", Yang et al. 2023, section 4).
The weight of a pair is (q e^b)·(k e^−b), with b the running sum of g; that is one product for a chunk, if e^−b is
finite. So the caller bounds g from below, and a chunk is at most as long as b stays above −80 (see `longest_chunk`);
both factors are then at most about e^40. Sums are float32, states of chunks are rounded to the dtype of the values, and
all start again with each document.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.chunks import entering_runs, head_chunks, head_rows, run_chunks
from flash_lm.ops.log_decay import LOWEST
from flash_lm.ops.matmul import matmul

# A power of two, so that it rounds nothing; between e^0 and e^80.
_CENTRE = 2.0**57


class GatedInputs(NamedTuple):
    """Queries, keys and log decays of GLA.

    q_BxHxLxK: queries.
    k_BxHxLxK: keys.
    log_decay_BxHxLxK: g, not positive, float32.
    """

    q_BxHxLxK: jax.Array
    k_BxHxLxK: jax.Array
    log_decay_BxHxLxK: jax.Array


def longest_chunk(floor: float) -> int:
    """How many tokens a chunk may have if no g is below `floor`, which is negative: 16 for −5."""
    return max(1, math.floor(LOWEST / floor))


def gated_sums(by: GatedInputs, v_BxHxLxE: jax.Array, runs_BxL: jax.Array, *, chunk_size: int) -> jax.Array:
    """GLA over the tokens of each document, chunkwise form: o_t = q_t S_t.

    Args:
        by: queries, keys and decays; the decays of a chunk must not add up to less than −80.
        v_BxHxLxE: values.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        chunk_size: C.

    Returns:
        B×H×L×E, dtype of v.
    """
    nothing = jnp.zeros((*v_BxHxLxE.shape[:2], by.k_BxHxLxK.shape[-1], v_BxHxLxE.shape[-1]), jnp.float32)
    return _in_chunks(by, v_BxHxLxE, runs_BxL, chunk_size, nothing, v_BxHxLxE.dtype)[0]


def prefill_gated(
    by: GatedInputs, v_BxHxLxE: jax.Array, state_BxHxKxE: jax.Array, real_BxL: jax.Array, *, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """`gated_sums` for tokens that continue a state.

    Args:
        by: queries, keys and decays.
        v_BxHxLxE: values.
        state_BxHxKxE: S after the tokens before these, float32.
        real_BxL: which tokens are not padding; padding is at the end.
        chunk_size: C.

    Returns:
        B×H×L×E, dtype of v; and S after the real tokens.
    """
    real = real_BxL[:, None, :, None]
    # Padding leaves the state as it is. Beyond the last position it may be NaN, and zero times NaN is NaN.
    q, k, log_decay, v = (jnp.where(real, x, 0) for x in (*by, v_BxHxLxE))
    # A state that is kept stays float32.
    by, runs_BxL = GatedInputs(q, k, log_decay), jnp.ones_like(real_BxL, jnp.int32)
    return _in_chunks(by, v, runs_BxL, chunk_size, state_BxHxKxE, jnp.dtype(jnp.float32))


def step_gated(by: GatedInputs, v_BxHx1xE: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Recurrent form, one token: B×H×1×E, dtype of v; and the state after it, B×H×K×E float32."""
    q, k, log_decay, v = (x.astype(jnp.float32) for x in (*by, v_BxHx1xE))
    state = jnp.swapaxes(jnp.exp(log_decay), 2, 3) * state + jnp.swapaxes(k, 2, 3) * v
    return matmul(q, state).astype(v_BxHx1xE.dtype), state


def _in_chunks(by: GatedInputs, v, runs_BxL, chunk_size: int, state, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The outputs, and the state after all tokens; `dtype`: of what chunks add to it, and of the parts of outputs."""
    length = v.shape[2]
    size = min(chunk_size, length)
    # What fills the last chunk counts as more of the last document: its keys are zeros and nothing decays.
    runs = run_chunks(runs_BxL, size)[:, None]
    q, k, log_decay, v_chunks = (head_chunks(x, size) for x in (*by, v))
    # Running sums b of g per channel, starting again with each document.
    sums = _running(log_decay, runs)
    end = sums[..., -1:, :]
    last, entering = runs[..., -1:], entering_runs(runs[:, 0, :, -1])[:, None, :, None]
    of_last, of_entering = ((runs == run) & (runs > 0) for run in (last, entering))

    # State that each chunk adds for its last document, and the decay of the entering state.
    written = matmul(_decay_state(k, end - sums, of_last), v_chunks, transpose_a=True, dtype=dtype)
    kept = jnp.where(last == entering, jnp.exp(end[..., 0, :]), 0)

    def next_chunk(state_BxHxKxE: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kept_BxHxK, written_BxHxKxE = chunk
        return kept_BxHxK[..., None] * state_BxHxKxE + written_BxHxKxE, state_BxHxKxE.astype(v.dtype)

    state, before = jax.lax.scan(next_chunk, state, (jnp.moveaxis(kept, 2, 0), jnp.moveaxis(written, 2, 0)))
    # Outputs: the entering state, and the pairs inside the chunk.
    read = matmul(_decay_state(q, sums, of_entering), jnp.moveaxis(before, 0, 2), dtype=dtype)
    out = _inside(q, k, v_chunks, sums, runs, dtype) + read
    return head_rows(out.astype(v.dtype), length), state


@jax.checkpoint
def _running(log_decay: jax.Array, runs: jax.Array) -> jax.Array:
    """Σ g of the token's document in its chunk, up to and including the token."""
    size = runs.shape[-1]
    counts = (runs[..., :, None] == runs[..., None, :]) & jnp.tri(size, dtype=bool)[None, None, None]
    sums = jnp.matmul(counts.astype(jnp.float32), log_decay, precision=jax.lax.Precision.HIGHEST)
    return jnp.maximum(sums, LOWEST)


@jax.checkpoint
def _decay_state(x: jax.Array, log: jax.Array, where: jax.Array) -> jax.Array:
    """Each token's channels times e^log, and 0 except `where`; dtype of x."""
    where = where[..., None]
    return jnp.where(where, x.astype(jnp.float32) * jnp.exp(jnp.where(where, log, 0)), 0).astype(x.dtype)


@functools.partial(jax.checkpoint, static_argnums=5)
def _inside(q: jax.Array, k: jax.Array, v: jax.Array, sums: jax.Array, runs: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The pairs inside the chunk."""
    # The centre keeps both factors e^b and e^−b inside the range of float32.
    queries = (q.astype(jnp.float32) * (jnp.exp(sums) * _CENTRE)).astype(q.dtype)
    keys = (k.astype(jnp.float32) * (jnp.exp(-sums) / _CENTRE)).astype(k.dtype)
    same = (runs[..., :, None] == runs[..., None, :]) & (runs > 0)[..., None]
    visible = same & jnp.tri(v.shape[-2], dtype=bool)[None, None, None]
    weights = matmul(queries, keys, transpose_b=True, dtype=v.dtype)
    return matmul(jnp.where(visible, weights, 0), v, dtype=dtype)
