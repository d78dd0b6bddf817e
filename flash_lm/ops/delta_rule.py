"""Gated delta rule: S ← e^g S; S ← S + kᵀ β (v − k S); o = q S ("Gated Delta Networks", Yang et al. 2024, eq. 10).

Chunkwise form (ibid., section 3.3): the new values of a chunk, v′ = T β (v − e^b k S), solves a triangular system,
T⁻¹ = I + tril(β k kᵀ ⊙ e^(b_i − b_j), −1), with b the running sum of g and S the sum that enters the chunk; then the
chunk is that of a decayed sum of v′. The system is solved by substitution: for equal keys and β = 1 powers of its
matrix exceed float32, while T holds only 0 and ±1. Chunks follow each other in a loop. The system, its inverse
while it is computed, and the state are float32; operands of products have the dtype of the values; all start again with
each document.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.chunks import entering_runs, head_chunks, head_rows, run_chunks
from flash_lm.ops.log_decay import decay_between, running
from flash_lm.ops.matmul import matmul
from flash_lm.ops.scalar_decay import apply_weights
from flash_lm.ops.unit_triangular import unit_inverse


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule besides the values.

    q_BxHxLxK: queries.
    k_BxHxLxK: keys, of length 1 or 0.
    log_decay_BxHxL: g, not positive, float32; one below −80 counts as −80.
    beta_BxHxL: β, strength of the write: how far the value read by the key moves towards v, float32.
    """

    q_BxHxLxK: jax.Array
    k_BxHxLxK: jax.Array
    log_decay_BxHxL: jax.Array
    beta_BxHxL: jax.Array


def delta_rule(by: DeltaInputs, v_BxHxLxE: jax.Array, runs_BxL: jax.Array, *, chunk_size: int) -> jax.Array:
    """Gated delta rule over the tokens of each document, chunkwise form: o_t = q_t S_t.

    Args:
        by: queries, keys, decays and β.
        v_BxHxLxE: values.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        chunk_size: C.

    Returns:
        B×H×L×E, dtype of v.
    """
    nothing = jnp.zeros((*v_BxHxLxE.shape[:2], by.k_BxHxLxK.shape[-1], v_BxHxLxE.shape[-1]), jnp.float32)
    return _split_chunks(by, v_BxHxLxE, runs_BxL, chunk_size, nothing)[0]


def prefill_delta(
    by: DeltaInputs, v_BxHxLxE: jax.Array, state_BxHxKxE: jax.Array, real_BxL: jax.Array, *, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """`delta_rule` for tokens that continue a state.

    Args:
        by: queries, keys, decays and β.
        v_BxHxLxE: values.
        state_BxHxKxE: S after the tokens before these, float32.
        real_BxL: which tokens are not padding; padding is at the end.
        chunk_size: C.

    Returns:
        B×H×L×E, dtype of v; and S after the real tokens.
    """
    real = real_BxL[:, None]
    # Padding leaves the state as it is. Beyond the last position it may be NaN, and zero times NaN is NaN.
    q, k, v = (jnp.where(real[..., None], x, 0) for x in (by.q_BxHxLxK, by.k_BxHxLxK, v_BxHxLxE))
    log_decay, beta = (jnp.where(real, x, 0) for x in (by.log_decay_BxHxL, by.beta_BxHxL))
    runs_BxL = jnp.ones_like(real_BxL, jnp.int32)
    return _split_chunks(DeltaInputs(q, k, log_decay, beta), v, runs_BxL, chunk_size, state_BxHxKxE)


def step_delta(by: DeltaInputs, v_BxHx1xE: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Recurrent form, one token: B×H×1×E, dtype of v; and the state after it, B×H×K×E float32."""
    q, k, log_decay, beta = (x.astype(jnp.float32) for x in by)
    state = jnp.exp(log_decay)[..., None] * state
    new_BxHx1xE = beta[..., None] * (v_BxHx1xE.astype(jnp.float32) - matmul(k, state))
    state += jnp.swapaxes(k, 2, 3) * new_BxHx1xE
    return matmul(q, state).astype(v_BxHx1xE.dtype), state


class _Chunk(NamedTuple):
    """Inputs of the inter-chunk recurrence besides the entering state, B×H×C×… each.

    writes: T β v, the new values if S were zero.
    keys: T β e^b k, of the entering document.
    weights: q kᵀ ⊙ e^(b_i − b_j), of each pair of a document.
    queries: e^b q, of the entering document.
    written: e^(b_C − b) k, of the last document.
    kept: decay of the entering state through the chunk, B×H×1; 0 if its document has ended.
    """

    writes: jax.Array
    keys: jax.Array
    weights: jax.Array
    queries: jax.Array
    written: jax.Array
    kept: jax.Array


def _split_chunks(by: DeltaInputs, v, runs_BxL, chunk_size: int, state) -> tuple[jax.Array, jax.Array]:
    length = v.shape[2]
    size = min(chunk_size, length)
    # What fills the last chunk counts as more of the last document: its keys are zeros and nothing decays.
    runs = run_chunks(runs_BxL, size)[:, None]
    q, k, log_decay, beta, v_chunks = (head_chunks(x, size) for x in (*by, v))
    # Decays e^(b_i − b_j) between tokens of the same document, from the running sums b of g.
    sums = running(log_decay, runs)
    end, nothing = sums.at(lambda x: x[..., -1:]), sums.at(jnp.zeros_like)
    entering = entering_runs(runs[:, 0, :, -1])[:, None, :, None]
    of_last, of_entering = ((runs == run) & (runs > 0) for run in (runs[..., -1:], entering))
    same = (runs[..., :, None] == runs[..., None, :]) & (runs > 0)[..., None]
    up_to_own = jnp.tri(size, dtype=bool)[None, None, None]
    between = decay_between(sums.at(lambda x: x[..., :, None]), sums.at(lambda x: x[..., None, :]), same & up_to_own)
    from_start = decay_between(sums, nothing, of_entering)

    # UT transform: T = (I + tril(β k kᵀ ⊙ decay, −1))⁻¹, applied to β v and to β e^b k.
    earlier = jnp.tri(size, k=-1, dtype=jnp.float32)[None, None, None]
    system = beta[..., None] * matmul(k, k, transpose_b=True) * between * earlier
    # Products in the dtype of the values, as in the other chunkwise forms.
    dtype = v.dtype
    inverse = (unit_inverse(system) * beta[..., None, :]).astype(dtype)
    wide = jnp.concatenate([v_chunks, apply_weights(k, from_start)], axis=-1)
    solved = matmul(inverse, wide, dtype=dtype)
    chunks = _Chunk(
        writes=solved[..., : v.shape[-1]],
        keys=solved[..., v.shape[-1] :],
        weights=(matmul(q, k, transpose_b=True) * between).astype(dtype),
        queries=apply_weights(q, from_start),
        written=apply_weights(k, decay_between(end, sums, of_last)),
        kept=jnp.where((runs[..., -1:] == entering)[..., 0], jnp.exp(end.total()[..., 0]), 0)[..., None],
    )

    @jax.checkpoint
    def process_chunk(entering_BxHxKxE: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
        # New values v′ = T β (v − e^b k S), then the outputs and the state at the end of the chunk.
        entering = entering_BxHxKxE.astype(dtype)
        new = (chunk.writes - matmul(chunk.keys, entering)).astype(dtype)
        out = matmul(chunk.queries, entering, dtype=dtype) + matmul(chunk.weights, new, dtype=dtype)
        after = chunk.kept[..., None] * entering_BxHxKxE + matmul(chunk.written, new, transpose_a=True)
        return after, out

    # Inter-chunk recurrence: one chunk after another.
    state, out = jax.lax.scan(process_chunk, state, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), chunks))
    return head_rows(jnp.moveaxis(out, 0, 2), length), state
