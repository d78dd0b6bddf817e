"""Linear attention with scalar decay (RetNet, Mamba-2): S_t = e^{g_t} S_{t−1} + k_tᵀ v_t, o_t = q_t S_t, g_t ≤ 0.

Chunkwise form of "Transformers are SSMs" (Dao and Gu 2024, section 6): pair by pair inside a chunk,
(q kᵀ ⊙ e^(b_i − b_j)) v with b the running sum of g, and through a sum over the chunks before it. All factors are at
most 1. Sums are float32, states of chunks are rounded to the dtype of the values, and all start again with each
document: by masks, not by a g of −∞, whose differences are NaN. No denominator.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flash_lm.ops.chunks import entering_runs, head_chunks, head_rows, run_chunks, sums_before
from flash_lm.ops.kernels.chunks import attend_in_chunks
from flash_lm.ops.kernels.programs import Form
from flash_lm.ops.log_decay import Running, decay_between, running
from flash_lm.ops.matmul import matmul, sum_axis
from flash_lm.ops.target import target_platform
from flash_lm.ops.visibility import KeySpan


class Kernel(NamedTuple):
    """The kernel for the pairs inside the chunks of a causal sequence, instead of XLA.

    backend: a name of `ops.kernels.backends.BACKENDS`.
    key_span: keys that each token sees.
    """

    backend: str
    key_span: KeySpan


def decayed_sums(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    log_decay_BxHxL: jax.Array,
    runs_BxL: jax.Array,
    *,
    chunk_size: int,
    causal: bool = True,
    kernel: Kernel | None = None,
) -> jax.Array:
    """Chunkwise form: Σ_j e^−|b_i − b_j| (q_i·k_j) v_j over the query's document; if causal, none after the query.

    The backward pass keeps the inputs and a state per chunk.

    Args:
        q_BxHxLxK: queries, of H heads or one that all share.
        k_BxHxLxK: keys, as many heads.
        v_BxHxLxE: values.
        log_decay_BxHxL: g, not positive, (B or 1)×H×(L or 1) float32; one below −80 counts as −80.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        chunk_size: C.
        causal: hide keys after the query.
        kernel: for a causal sequence; None: XLA compiles all of it.

    Returns:
        B×H×L×E, dtype of v.
    """
    # Outputs are the pairs inside the chunk plus the state of the chunks before; bidirectional: also of those after.
    row, length = _Chunks.of(q_BxHxLxK, k_BxHxLxK, v_BxHxLxE, log_decay_BxHxL, runs_BxL, chunk_size), v_BxHxLxE.shape[2]
    dtype = v_BxHxLxE.dtype
    before = _again(lambda row: row.from_before(None, dtype))(row)
    out = _again(lambda row, before: row.reading(before, dtype))(row, before)
    if kernel is not None:
        inside = _inside_by_kernel(kernel, q_BxHxLxK, k_BxHxLxK, v_BxHxLxE, row.sums, runs_BxL, chunk_size)
        return (head_rows(out, length) + inside).astype(inside.dtype)
    out += _inside(*row, causal, dtype)
    if not causal:
        out += row.reading_after(row.from_after(dtype), dtype)
    return head_rows(out, length)


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
    """`decayed_sums` for tokens that continue a state.

    Args:
        q_BxHxLxK: queries, of H heads or one that all share.
        k_BxHxLxK: keys, as many heads.
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
    # Padding neither writes to the state nor decays it.
    log_decay = jnp.where(real, log_decay_BxHxL, 0)
    row = _Chunks.of(q, k, v, log_decay, jnp.ones_like(real_BxL, jnp.int32), chunk_size)
    # A state that is kept stays float32.
    before = row.from_before(state_BxHxKxE, jnp.float32)
    out = _inside(*row, True, jnp.float32) + row.reading(before, jnp.float32)
    return head_rows(out.astype(v.dtype), v.shape[2]), row.final(before)


def step_decayed(
    q_BxHx1xK: jax.Array, k_BxHx1xK: jax.Array, v_BxHx1xE: jax.Array, log_decay_BxHx1: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Recurrent form, one token: B×H×1×E, dtype of v; and the state after it, B×H×K×E float32."""
    q, k, v = (x.astype(jnp.float32) for x in (q_BxHx1xK, k_BxHx1xK, v_BxHx1xE))
    state = jnp.exp(log_decay_BxHx1.astype(jnp.float32))[..., None] * state + jnp.swapaxes(k, 2, 3) * v
    q = jnp.broadcast_to(q, (*state.shape[:2], *q.shape[2:]))
    return matmul(q, state).astype(v_BxHx1xE.dtype), state


def _again(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function whose derivative computes its intermediate results again: on a CPU that would take longer."""
    return function if target_platform() == "cpu" else jax.checkpoint(function)


class _Chunks(NamedTuple):
    """A sequence in chunks: arrays B×H×G×C×…, the running sums of g in each chunk, and runs, (B or 1)×1×G×C."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sums: Running
    runs: jax.Array

    @classmethod
    def of(cls, q, k, v, log_decay, runs_BxL, chunk_size: int) -> "_Chunks":
        """The last chunk is filled with zeros, which count as more of the last document."""
        size = min(chunk_size, v.shape[2])
        alike = log_decay.shape[2] == 1
        if alike:  # the same decay for all chunks and documents
            log_decay = jnp.broadcast_to(log_decay, (*log_decay.shape[:2], size))
        runs = run_chunks(runs_BxL, size)[:, None]
        q, k, v, log_decay = (head_chunks(x, size) for x in (q, k, v, log_decay))
        return cls(q, k, v, running(log_decay, None if alike else runs), runs)

    def end(self) -> Running:
        """The sums over the full chunk."""
        return self.sums.at(lambda x: x[..., -1:])

    def through(self) -> jax.Array:
        """Log decay through the full chunk, B×H×G."""
        return jnp.broadcast_to(self.end().total()[..., 0], self.v.shape[:3])

    def ending(self, dtype: DTypeLike) -> jax.Array:
        """The state of each chunk over its last document, at the end of the chunk, B×H×G×K×E."""
        weight = decay_between(self.end(), self.sums, self._of(self.runs[..., -1:]))
        return _sum_of(self.k, apply_weights(self.v, weight), dtype)

    def from_before(self, initial: jax.Array | None, dtype: DTypeLike) -> jax.Array:
        """The state that enters each chunk from the chunks before, before its first token, B×H×G×K×E."""
        return _sums_before(self.ending(dtype), self.runs[..., -1], initial, self.through())

    def reading(self, before: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The outputs q S from the state of earlier chunks."""
        entering = entering_runs(self.runs[:, 0, :, -1])[:, None, :, None]
        weight = decay_between(self.sums, self.sums.at(jnp.zeros_like), self._of(entering))
        return apply_weights(_read(self.q, before, dtype), weight)

    def from_after(self, dtype: DTypeLike) -> jax.Array:
        """The state of the chunks after each chunk, after its last token, B×H×G×K×E."""
        weight = decay_between(self.sums, self.sums.at(jnp.zeros_like), self._of(self.runs[..., :1]))
        starting = _sum_of(self.k, apply_weights(self.v, weight), dtype)
        starting, first, through = (jnp.flip(x, axis=2) for x in (starting, self.runs[..., 0], self.through()))
        return jnp.flip(_sums_before(starting, first, None, through), axis=2)

    def reading_after(self, after: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The outputs q S from the state of later chunks."""
        entering = jnp.flip(entering_runs(jnp.flip(self.runs[:, 0, :, 0], axis=1)), axis=1)[:, None, :, None]
        weight = decay_between(self.end(), self.sums, self._of(entering))
        return apply_weights(_read(self.q, after, dtype), weight)

    def final(self, before: jax.Array) -> jax.Array:
        """The state after a sequence of one document, if the padding of its last chunk does not decay, B×H×K×E."""
        return jnp.exp(self.through()[..., -1])[..., None, None] * before[:, :, -1] + self.ending(jnp.float32)[:, :, -1]

    def _of(self, run: jax.Array) -> jax.Array:
        return (self.runs == run) & (self.runs > 0)


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, static_argnums=(5, 6))
def _inside(q, k, v, sums: Running, runs: jax.Array, causal: bool, dtype: DTypeLike) -> jax.Array:
    """(q kᵀ ⊙ e^−|b_i − b_j|) v over pairs inside the chunk; the derivative computes its weights again."""
    # Decay mask: e^−|b_i − b_j| within a document, lower triangle, and upper triangle if bidirectional.
    visible = (runs[..., :, None] == runs[..., None, :]) & (runs > 0)[..., None]
    before = jnp.tri(v.shape[-2], dtype=bool)[None, None, None]
    query, key = sums.at(lambda x: x[..., :, None]), sums.at(lambda x: x[..., None, :])
    weights = decay_between(query, key, visible & before)
    if not causal:
        weights += decay_between(key, query, visible & ~before)
    return matmul(_times(matmul(q, k, transpose_b=True), weights).astype(v.dtype), v, dtype=dtype)


def _inside_by_kernel(kernel: Kernel, q, k, v, sums: Running, runs_BxL: jax.Array, chunk_size: int) -> jax.Array:
    """Pairs inside the chunks of a causal sequence by a kernel, B×H×L×E, dtype of v."""
    batch, heads, length, _ = v.shape
    q, k = (jnp.broadcast_to(x, (batch, heads, *x.shape[2:])) for x in (q, k))
    size = min(chunk_size, length)
    padded_shape = (batch, heads, -(-length // size), size)
    decay = sums.at(lambda x: head_rows(jnp.broadcast_to(x, padded_shape), length))
    form, once_BxL = Form("identity", 1.0, kernel.backend), jnp.ones((1, length), jnp.float32)
    of_row = {"chunk_size": size, "divisor_BxL": once_BxL, "decay": decay}
    return attend_in_chunks(form, q, k, v, runs_BxL, kernel.key_span, **of_row)


def _sums_before(sums_BxHxGxKxE, last_Bx1xG, initial, through_BxHxG) -> jax.Array:
    shape = sums_BxHxGxKxE.shape
    last_NxG = jnp.broadcast_to(last_Bx1xG, shape[:3]).reshape(-1, shape[2])
    fold = lambda x: x.reshape(-1, *x.shape[2:])
    initial = None if initial is None else fold(initial)
    return sums_before(fold(sums_BxHxGxKxE), last_NxG, initial, fold(through_BxHxG)).reshape(shape)


def _sum_of(k: jax.Array, v: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Σ kᵀ v over each chunk, B×H×G×K×E; shared keys make one product with the values of all heads."""
    if k.shape[1] == v.shape[1]:
        return matmul(k, v, transpose_a=True, dtype=dtype)
    return _heads_apart(matmul(k[:, 0], _heads_beside(v), transpose_a=True, dtype=dtype), v.shape[1])


def _read(q: jax.Array, sums: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The product with S, B×H×G×C×E; shared queries make one product with the sums of all heads."""
    if q.shape[1] == sums.shape[1]:
        return matmul(q, sums.astype(q.dtype), dtype=dtype)
    return _heads_apart(matmul(q[:, 0], _heads_beside(sums.astype(q.dtype)), dtype=dtype), sums.shape[1])


def _heads_beside(x_BxHxGxCxE: jax.Array) -> jax.Array:
    """B×G×C×(H·E): so that the heads are columns of one product, and derivatives sum over one dimension."""
    x_BxGxCxHxE = jnp.moveaxis(x_BxHxGxCxE, 1, 3)
    return x_BxGxCxHxE.reshape(*x_BxGxCxHxE.shape[:3], -1)


def _heads_apart(x_BxGxCxHE: jax.Array, heads: int) -> jax.Array:
    return jnp.moveaxis(x_BxGxCxHE.reshape(*x_BxGxCxHE.shape[:3], heads, -1), 3, 1)


@jax.custom_vjp
def apply_weights(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The vectors of tokens times a weight per token; dtype of x."""
    return (x.astype(jnp.float32) * weight[..., None]).astype(x.dtype)


def _weighted_backward(kept: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    d_weight = sum_axis(x.astype(jnp.float32) * d_out.astype(jnp.float32), -1)[..., 0]
    alike = tuple(i for i, size in enumerate(weight.shape) if size == 1 != d_weight.shape[i])
    return apply_weights(d_out, weight), d_weight.sum(axis=alike, keepdims=True)


apply_weights.defvjp(lambda x, weight: (apply_weights(x, weight), (x, weight)), _weighted_backward)


def _times(scores: jax.Array, weights: jax.Array) -> jax.Array:
    """Scores, perhaps of one head for all, times the weights of H heads."""
    if scores.shape[1] == weights.shape[1]:
        return scores * weights
    return _times_shared(scores, jnp.broadcast_to(weights, (scores.shape[0], weights.shape[1], *scores.shape[2:])))


@jax.custom_vjp
def _times_shared(scores: jax.Array, weights: jax.Array) -> jax.Array:
    return scores * weights


def _times_shared_backward(kept: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    scores, weights = kept
    # One head after another: XLA's CPU backend sums over heads on one core.
    terms = [d_out[:, h : h + 1] * weights[:, h : h + 1] for h in range(d_out.shape[1])]
    return functools.reduce(jnp.add, terms), d_out * scores


_times_shared.defvjp(lambda scores, weights: (scores * weights, (scores, weights)), _times_shared_backward)
