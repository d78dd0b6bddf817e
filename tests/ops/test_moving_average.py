"""Damped moving averages against their recurrence in float64: values, derivatives, states, and extreme rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.moving_average import Average, moving_average, prefill_moving_average
from flash_lm.ops.segments import find_segments
from ops.test_segments import LENGTH, random_ids

BATCH, WIDTH, SUMS = 3, 4, 3
RUNS = np.asarray(jax.jit(find_segments)(random_ids(5)[:BATCH]).runs_BxL)
ONE = np.ones_like(RUNS)
run = jax.jit(moving_average, static_argnames="chunk_size")
prefill = jax.jit(prefill_moving_average, static_argnames="chunk_size")


def inputs() -> tuple[np.ndarray, Average]:
    """Inputs, and channels that keep all, almost all, some and almost nothing."""
    random = np.random.default_rng(0)
    decay = np.array([1, 1 - 1e-5, 0.7, 1e-7])[:, None] ** [[1, 1.5, 2]]
    into, out = random.standard_normal((2, WIDTH, SUMS))
    x = random.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    return x, Average(*(y.astype(np.float32) for y in (np.log(decay), into, out)))


def expected(x, average: Average, runs: np.ndarray) -> np.ndarray:
    x, (log_kept, into, out) = np.asarray(x, np.float64), (np.asarray(y, np.float64) for y in average)
    out_BxLxD = np.zeros_like(x)
    for b in range(len(x)):
        sums = np.zeros_like(into)
        for t, run in enumerate(runs[b]):
            if t and run != runs[b, t - 1]:
                sums = np.zeros_like(into)
            sums = np.exp(log_kept) * sums + into * x[b, t, :, None]
            out_BxLxD[b, t] = (out * sums).sum(axis=1) * (run > 0)
    return out_BxLxD


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_values(chunk_size):
    x, average = inputs()
    actual = run(x, average, RUNS, chunk_size=chunk_size)
    np.testing.assert_allclose(actual, expected(x, average, RUNS), rtol=1e-5, atol=2e-5)


def test_long_sequences_keep_their_first_token():
    """Decays are powers of one logarithm, so the product over thousands of tokens is exact to its last digits."""
    length = 8192
    x = np.zeros((1, length, WIDTH), np.float32)
    x[:, 0] = 1
    _, average = inputs()
    actual = run(x, average, np.ones((1, length), np.int32), chunk_size=16)
    decay = np.exp(np.arange(length)[:, None, None] * average.log_kept.astype(np.float64))
    exact = (decay * average.into * average.out).sum(axis=-1)
    np.testing.assert_allclose(actual[0], exact, rtol=1e-4, atol=1e-5)


def test_derivatives():
    """Along random directions, against differences of the recurrence."""
    random, step = np.random.default_rng(2), 1e-6
    x, average = inputs()
    exact = [y.astype(np.float64) for y in (x, *average)]
    out_weights = random.standard_normal(x.shape)
    loss = lambda x, *fields: (moving_average(x, Average(*fields), jnp.asarray(RUNS), chunk_size=5) * out_weights).sum()
    grads = jax.jit(jax.grad(loss, argnums=range(4)))(*(jnp.asarray(y, jnp.float32) for y in exact))
    for i, grad in enumerate(grads):
        direction = random.standard_normal(exact[i].shape)
        shifted = [[y + sign * step * direction if j == i else y for j, y in enumerate(exact)] for sign in (1, -1)]
        ends = [(expected(y[0], Average(*y[1:]), RUNS) * out_weights).sum() for y in shifted]
        difference = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((np.asarray(grad) * direction).sum(), difference, rtol=1e-4, atol=1e-4)


def test_a_sequence_in_pieces():
    """Prefill at any split, also of no tokens, and single tokens; padding leaves the state unchanged."""
    x, average = inputs()
    state, outs, start = np.zeros((BATCH, WIDTH, SUMS), np.float32), [], 0
    for stop, padding in ((7, 3), (7, 4), (8, 0), (21, 2), *((t, 0) for t in range(22, LENGTH + 1))):
        piece = np.pad(x[:, start:stop], [(0, 0), (0, padding), (0, 0)], constant_values=np.nan)
        real = np.arange(stop - start + padding)[None] < np.full((BATCH, 1), stop - start)
        out, state = prefill(piece, average, state, real, chunk_size=8)
        outs.append(np.asarray(out)[:, : stop - start])
        start = stop
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected(x, average, ONE), rtol=1e-5, atol=1e-5)
