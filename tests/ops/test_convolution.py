"""Convolutions inside documents against their definition, tap by tap, and from a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.convolution import convolve as expected_of
from oracles.segments import visibility

from flash_lm.ops.convolution import continue_convolution, convolve, convolve_heads
from flash_lm.ops.segments import find_segments

D, E = 5, 3
# Documents shorter than the filter, borders off every grid, padding between and at the end, an id that comes again.
IDS = np.array([[4] * 7 + [0] * 2 + [4] * 2 + [1] + [2] * 9 + [0] * 2, [3] * 23], np.int32)
GARBAGE = 1e6
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "centred"])
both_kinds = pytest.mark.parametrize("full", [False, True], ids=["depthwise", "full"])


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def taps_of(count: int, full: bool) -> np.ndarray:
    return draw(count, D, E) if full else draw(count, D)


def expected(x, taps, causal: bool, ids=IDS) -> np.ndarray:
    rows = [(x_LxD.astype(float), visibility(row.tolist(), causal)) for x_LxD, row in zip(x, ids, strict=True)]
    return np.stack([expected_of(x_LxD, taps.astype(float), sees, causal) for x_LxD, sees in rows])


def run(x, taps, causal: bool, ids=IDS):
    return convolve(x, taps, find_segments(jnp.asarray(ids)).runs_BxL, causal=causal)


@pytest.mark.parametrize("count", [2, 3, 4, 30])
@both_kinds
@both_ways
def test_values(causal, full, count):
    """Whatever the padding holds, and with more taps than tokens."""
    x, taps, keep = draw(2, 23, D), taps_of(count, full), (IDS > 0)[..., None]
    found = np.asarray(run(np.where(keep, x, GARBAGE).astype(np.float32), taps, causal))
    np.testing.assert_allclose(found, expected(x, taps, causal), atol=1e-5)
    assert (found[IDS == 0] == 0).all()


@both_kinds
@both_ways
def test_gradients(causal, full):
    """It is linear in both arguments: the derivative along a direction is the convolution of that direction."""
    x, taps, keep = draw(2, 23, D), taps_of(4, full), (IDS > 0)[..., None]
    along = draw(2, 23, E if full else D)
    loss = lambda x, taps: (along * run(x, taps, causal)).sum()
    of_x, of_taps = jax.grad(loss, (0, 1))(np.where(keep, x, GARBAGE).astype(np.float32), taps)
    assert (np.asarray(of_x)[IDS == 0] == 0).all()
    dx, dtaps = draw(3, 23, D)[:2], taps_of(5, full)[:4]
    np.testing.assert_allclose((of_x * dx).sum(), (along * expected(dx, taps, causal)).sum(), rtol=1e-4)
    np.testing.assert_allclose((of_taps * dtaps).sum(), (along * expected(x, dtaps, causal)).sum(), rtol=1e-4)


@both_ways
def test_documents_are_alone(causal):
    """A document in a row of its own has bit for bit what it has among others."""
    x, taps = draw(2, 23, D), taps_of(4, False)
    found = np.asarray(run(x, taps, causal))
    for start, end in ((0, 7), (9, 11), (11, 12), (12, 21)):
        alone = run(x[:1, start:end], taps, causal, np.ones((1, end - start), np.int32))
        np.testing.assert_array_equal(found[0, start:end], alone[0])


@both_kinds
def test_from_a_state_at_any_split(full):
    """Rows at different places, by any number of tokens, also none, with NaN in the padding."""
    x, taps = draw(2, 23, D), taps_of(4, full)
    whole = expected(x, taps, True, np.ones((2, 23), np.int32))
    starts, last = np.zeros(2, int), jnp.zeros((2, 3, D))
    for lengths in ((1, 0), (0, 2), (2, 6), (9, 1), (1, 1), (10, 13)):
        new = np.full((2, max(lengths), D), np.nan, np.float32)
        for b, length in enumerate(lengths):
            new[b, :length] = x[b, starts[b] : starts[b] + length]
        out, last = continue_convolution(jnp.asarray(new), jnp.asarray(taps), last, jnp.asarray(lengths))
        for b, length in enumerate(lengths):
            np.testing.assert_allclose(out[b, :length], whole[b, starts[b] : starts[b] + length], atol=1e-5)
        starts += lengths
    np.testing.assert_array_equal(last, x[:, -3:])


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["depthwise", "full"])
def test_sums_of_bfloat16_are_float32(full):
    """One rounding at the end: sixty-four terms of 1 + 1/64 would stick at a multiple of their size."""
    x = jnp.full((1, 64, D), 1 + 2.0**-6, jnp.bfloat16)
    taps = jnp.ones((64, D, 1) if full else (64, D), jnp.bfloat16)
    out = run(x, taps, True, np.ones((1, 64), np.int32))
    assert out.dtype == jnp.bfloat16 and out[0, -1, 0] == jnp.bfloat16(65 * (D if full else 1))


@pytest.mark.parametrize("taps", [1, 4, 33, 40])
@pytest.mark.parametrize("length", [1, 32, 45])
def test_filters_of_heads(taps, length):
    """Blocks of tokens join without a seam, and heads have filters of their own."""
    x, filters = draw(2, 3, length, 4), draw(taps, 3)
    found = jax.jit(convolve_heads)(x, filters)
    for b, h in np.ndindex(2, 3):
        own = np.repeat(filters[:, h : h + 1], 4, axis=1).astype(float)
        expected = expected_of(x[b, h].astype(float), own, lambda t, u: True, False)
        np.testing.assert_allclose(found[b, h], expected, rtol=1e-5, atol=1e-5)
