"""Convolutions within documents against their definition, tap by tap, and continued from a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.convolution import convolve as convolve_by_loops
from oracles.segments import visibility

from flash_lm.ops.convolution import continue_convolution, convolve, convolve_heads
from flash_lm.ops.segments import find_segments

D, E = 5, 3
# Documents shorter than the filter, borders off every grid, padding between and at the end, a repeated id.
IDS = np.array([[4] * 7 + [0] * 2 + [4] * 2 + [1] + [2] * 9 + [0] * 2, [3] * 23], np.int32)
GARBAGE = 1e6
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "centred"])
both_kinds = pytest.mark.parametrize("full", [False, True], ids=["depthwise", "full"])


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def draw_taps(count: int, full: bool) -> np.ndarray:
    return draw(count, D, E) if full else draw(count, D)


def expected(x, taps, causal: bool, ids=IDS) -> np.ndarray:
    rows = [(x_LxD.astype(float), visibility(row.tolist(), causal)) for x_LxD, row in zip(x, ids, strict=True)]
    return np.stack([convolve_by_loops(x_LxD, taps.astype(float), sees, causal) for x_LxD, sees in rows])


def convolve_documents(x, taps, causal: bool, ids=IDS):
    return convolve(x, taps, find_segments(jnp.asarray(ids)).runs_BxL, causal=causal)


run = jax.jit(convolve_documents, static_argnames="causal")


@pytest.mark.parametrize("count", [2, 3, 4, 30])
@both_kinds
@both_ways
def test_values(causal, full, count):
    """Padding has no effect; there may be more taps than tokens."""
    x, taps, keep = draw(2, 23, D), draw_taps(count, full), (IDS > 0)[..., None]
    actual = np.asarray(run(np.where(keep, x, GARBAGE).astype(np.float32), taps, causal))
    np.testing.assert_allclose(actual, expected(x, taps, causal), atol=1e-5)
    assert (actual[IDS == 0] == 0).all()


@pytest.mark.parametrize(("platform", "full"), [("cpu", False), ("cpu", True), ("gpu", False)])
@both_ways
def test_gradients(causal, full, platform, monkeypatch):
    """It is linear in both arguments: the derivative along a direction is the convolution of that direction."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    x, taps, keep = draw(2, 23, D), draw_taps(4, full), (IDS > 0)[..., None]
    out_weights = draw(2, 23, E if full else D)
    loss = lambda x, taps: (out_weights * run(x, taps, causal)).sum()
    x_gradient, taps_gradient = jax.jit(jax.grad(loss, (0, 1)))(np.where(keep, x, GARBAGE).astype(np.float32), taps)
    assert (np.asarray(x_gradient)[IDS == 0] == 0).all()
    dx, dtaps = draw(3, 23, D)[:2], draw_taps(5, full)[:4]
    np.testing.assert_allclose((x_gradient * dx).sum(), (out_weights * expected(dx, taps, causal)).sum(), rtol=1e-4)
    np.testing.assert_allclose(
        (taps_gradient * dtaps).sum(), (out_weights * expected(x, dtaps, causal)).sum(), rtol=1e-4
    )


@both_ways
def test_documents_are_independent(causal):
    """A document alone has bit for bit the same output as among others, if XLA cannot fuse the operations."""
    x, taps = draw(2, 23, D), draw_taps(4, False)
    actual = np.asarray(convolve_documents(x, taps, causal))
    for start, end in ((0, 7), (9, 11), (11, 12), (12, 21)):
        alone = convolve_documents(x[:1, start:end], taps, causal, np.ones((1, end - start), np.int32))
        np.testing.assert_array_equal(actual[0, start:end], np.asarray(alone)[0])


@both_kinds
def test_from_a_state_at_any_split(full):
    """Sequences at different positions, any number of new tokens, also none, and NaN in the padding."""
    x, taps = draw(2, 23, D), draw_taps(4, full)
    full_output = expected(x, taps, True, np.ones((2, 23), np.int32))
    starts, last = np.zeros(2, int), np.zeros((2, 3, D), np.float32)
    for lengths in ((1, 0), (0, 2), (2, 6), (9, 1), (1, 1), (10, 13)):
        new = np.full((2, max(lengths), D), np.nan, np.float32)
        for b, length in enumerate(lengths):
            new[b, :length] = x[b, starts[b] : starts[b] + length]
        out, last = jax.jit(continue_convolution)(new, taps, last, np.array(lengths))
        for b, length in enumerate(lengths):
            np.testing.assert_allclose(
                np.asarray(out)[b, :length], full_output[b, starts[b] : starts[b] + length], atol=1e-5
            )
        starts += lengths
    np.testing.assert_array_equal(last, x[:, -3:])


@pytest.mark.slow("compiles a convolution of 64 taps")
@pytest.mark.parametrize("full", [False, True], ids=["depthwise", "full"])
def test_sums_of_bfloat16_are_float32(full):
    """Rounded once at the end: a bfloat16 sum of sixty-four terms 1 + 1/64 would lose their last digits."""
    x = jnp.full((1, 64, D), 1 + 2.0**-6, jnp.bfloat16)
    taps = jnp.ones((64, D, 1) if full else (64, D), jnp.bfloat16)
    out = run(x, taps, True, np.ones((1, 64), np.int32))
    assert out.dtype == jnp.bfloat16 and out[0, -1, 0] == jnp.bfloat16(65 * (D if full else 1))


@pytest.mark.parametrize("taps", [1, 4, 33, 40])
@pytest.mark.parametrize("length", [1, 32, 45])
def test_filters_of_heads(taps, length):
    """Exact across the borders of blocks, with one filter per head."""
    x, filters = draw(2, 3, length, 4), draw(taps, 3)
    actual = jax.jit(convolve_heads)(x, filters)
    for b, h in np.ndindex(2, 3):
        head_taps = np.repeat(filters[:, h : h + 1], 4, axis=1).astype(float)
        expected = convolve_by_loops(x[b, h].astype(float), head_taps, lambda t, u: True, False)
        np.testing.assert_allclose(actual[b, h], expected, rtol=1e-5, atol=1e-5)
