"""Multi-dimensional damped exponential moving average (EMA) of Mega, N dimensions per channel (Ma et al. 2022, eq. 6).

Rates are the same for all tokens: inside a chunk the average is a convolution, and what enters and leaves a chunk are
products with powers of the rates, the same for all chunks. The paper's Fourier transform over the row would carry
rounding from every token to every other, and past the end of a document.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.chunks import entering_runs, from_chunks, run_chunks, to_chunks
from flash_lm.ops.convolution import convolve


class Average(NamedTuple):
    """y = Σ_n out_n h_n with h_n ← kept_n h_n + into_n x, for each channel; D×N each, float32.

    log_kept: logarithm of what is kept from token to token, at most 0.
    """

    log_kept: jax.Array
    into: jax.Array
    out: jax.Array

    def powers(self, exponents_C: jax.Array) -> jax.Array:
        """Powers of the decay, C×D×N."""
        return jnp.exp(exponents_C.astype(jnp.float32)[:, None, None] * self.log_kept[None])


def moving_average(x_BxLxD: jax.Array, average: Average, runs_BxL: jax.Array, *, chunk_size: int) -> jax.Array:
    """Damped EMA over the tokens of each document, chunkwise form.

    Args:
        x_BxLxD: the input.
        average: rates and weights.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        chunk_size: C. Memory is N / C numbers per input, work C products.

    Returns:
        B×L×D float32. Padding gets zeros.
    """
    runs_BxL = jnp.broadcast_to(runs_BxL, x_BxLxD.shape[:2])
    initial = jnp.zeros((len(x_BxLxD), *average.into.shape), jnp.float32)
    out, _ = _average(x_BxLxD, average, runs_BxL, chunk_size, initial)
    return out


def prefill_moving_average(
    x_BxLxD: jax.Array, average: Average, state_BxDxN: jax.Array, real_BxL: jax.Array, *, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """`moving_average` for tokens that continue a state.

    Args:
        x_BxLxD: the input.
        average: rates and weights.
        state_BxDxN: the sums h after the tokens before these, float32.
        real_BxL: which tokens are not padding; padding is at the end.
        chunk_size: C.

    Returns:
        B×L×D float32, meaningless at padding; and the sums after the real tokens.
    """
    x = jnp.where(real_BxL[..., None], x_BxLxD, 0)  # beyond the last position it may be NaN
    size = min(chunk_size, x.shape[1])
    out, sums_BxGxDxN = _average(x, average, jnp.ones_like(real_BxL, jnp.int32), chunk_size, state_BxDxN)
    count_B = real_BxL.sum(axis=1, dtype=jnp.int32)
    full_chunks_B, rest_B = count_B // size, count_B % size
    state = jnp.take_along_axis(sums_BxGxDxN, full_chunks_B[:, None, None, None], axis=1)[:, 0]
    kept = jnp.exp(average.log_kept)[None]

    # The state after the last real token: from the start of its chunk, token by token.
    def next_token(i: jax.Array, state: jax.Array) -> jax.Array:
        index_B = jnp.minimum(full_chunks_B * size + i, x.shape[1] - 1)
        x_BxDx1 = jnp.take_along_axis(x, index_B[:, None, None], axis=1)[:, 0, :, None].astype(jnp.float32)
        return jnp.where((i < rest_B)[:, None, None], kept * state + average.into[None] * x_BxDx1, state)

    return out, jax.lax.fori_loop(0, size - 1, next_token, state)


def _average(
    x_BxLxD: jax.Array, average: Average, runs_BxL: jax.Array, chunk_size: int, initial_BxDxN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The averages; and the sums that enter each chunk and leave the last, B×(G+1)×D×N; `initial` enters run 1."""
    # Inside a chunk the average is a short convolution with powers of the decay.
    length, size = x_BxLxD.shape[1], min(chunk_size, x_BxLxD.shape[1])
    runs, x = run_chunks(runs_BxL, size), to_chunks(x_BxLxD.astype(jnp.float32), size)
    index_C = jnp.arange(size, dtype=jnp.int32)
    rows = lambda x_BxGx: x_BxGx.reshape(-1, *x_BxGx.shape[2:])
    # Taps are in the order of the tokens that they read, the current token last.
    taps_CxD = (average.powers(size - 1 - index_C) * (average.into * average.out)[None]).sum(axis=-1)
    inside = convolve(rows(x), taps_CxD, rows(runs), causal=True).reshape(x.shape)

    # The state at the end of each chunk, over its last document only.
    last_BxG = runs[:, :, -1]
    ending = jnp.where(((runs == last_BxG[..., None]) & (runs > 0))[..., None], x, 0)
    ends = _channel_filters("bgcd,cdn->bgdn", ending, average.powers(size - 1 - index_C) * average.into[None])
    entering_BxG = entering_runs(last_BxG)
    goes_on_BxG = entering_BxG == last_BxG
    kept = jnp.exp(size * average.log_kept)[None]

    # Inter-chunk recurrence, and the contribution of the entering state to each token.
    def next_chunk(sums: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        end, goes_on_B = chunk
        return jnp.where(goes_on_B[:, None, None], kept * sums, 0) + end, sums

    chunks = lambda x: jnp.moveaxis(x, 1, 0)
    after, entering = jax.lax.scan(next_chunk, initial_BxDxN, (chunks(ends), chunks(goes_on_BxG)))
    entering = jnp.moveaxis(entering, 0, 1)
    passed = _channel_filters("bgdn,cdn->bgcd", entering, average.powers(index_C + 1) * average.out[None])
    seen = (runs == entering_BxG[..., None]) & (runs > 0)
    out = from_chunks(inside + jnp.where(seen[..., None], passed, 0), length)
    return out, jnp.concatenate([entering, after[:, None]], axis=1)


def _channel_filters(names: str, x: jax.Array, powers: jax.Array) -> jax.Array:
    return jnp.einsum(names, x, powers, precision=jax.lax.Precision.HIGHEST)
