"""Convolutions whose taps differ by token against their definition, tap by tap, in documents and from a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.segments import visibility

from flash_lm.ops.dynamic_convolution import continue_dynamic_convolution, dynamic_convolution, softmax_of_taps
from flash_lm.ops.segments import find_segments

H, E, LENGTH = 2, 3, 75
# Documents shorter than the filter, borders off every grid, padding between and at the end, an id that comes again.
IDS = np.array([[4] * 37 + [0] * 2 + [4] * 2 + [1] + [2] * 31 + [0] * 2, [3] * LENGTH], np.int32)
ONE = np.ones_like(IDS)
RUNS = find_segments(jnp.asarray(IDS)).runs_BxL
GARBAGE = 1e6
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "centred"])
run = jax.jit(dynamic_convolution, static_argnames="causal")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def expected(x, weights, ids: np.ndarray, causal: bool) -> np.ndarray:
    count = weights.shape[-1]
    own, out = count - 1 if causal else count // 2, np.zeros(x.shape)
    for b, row in enumerate(ids.tolist()):
        sees = visibility(row, causal)
        for t in range(len(row)):
            for u in range(max(0, t - own), min(len(row), t - own + count)):
                if sees(t, u):
                    of_head = x[b, u].reshape(H, E) * weights[b, t, :, u - t + own, None]
                    out[b, t] += of_head.reshape(-1)
    return out


@pytest.mark.parametrize("count", [1, 6, 40])
@both_ways
def test_values(causal, count):
    """In one block and in several, whatever the padding holds, and with more taps than tokens of a document."""
    x, weights, keep = draw(2, LENGTH, H * E), draw(2, LENGTH, H, count), (IDS > 0)[..., None]
    for length in (1, 20, LENGTH):
        inputs = np.where(keep, x, GARBAGE).astype(np.float32)[:, :length]
        found = np.asarray(run(inputs, weights[:, :length], RUNS[:, :length], causal=causal))
        exact = expected(x[:, :length], weights[:, :length], IDS[:, :length], causal)
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
        assert (found[IDS[:, :length] == 0] == 0).all()


@both_ways
def test_taps_that_all_tokens_share(causal):
    x, taps_HxW = draw(2, LENGTH, H * E), draw(H, 9)
    found = run(x, taps_HxW[None, None], RUNS, causal=causal)
    weights = np.broadcast_to(taps_HxW, (2, LENGTH, H, 9))
    np.testing.assert_allclose(found, expected(x, weights, IDS, causal), rtol=1e-5, atol=1e-5)


@both_ways
def test_gradients(causal):
    """It is linear in both arguments: the derivative along a direction is the convolution of that direction."""
    x, weights, keep = draw(2, LENGTH, H * E), draw(2, LENGTH, H, 9), (IDS > 0)[..., None]
    along = draw(3, LENGTH, H * E)[:2]
    loss = lambda x, weights: (along * run(x, weights, RUNS, causal=causal)).sum()
    of_x, of_weights = jax.grad(loss, (0, 1))(np.where(keep, x, GARBAGE).astype(np.float32), weights)
    assert (np.asarray(of_x)[IDS == 0] == 0).all() and (np.asarray(of_weights)[IDS == 0] == 0).all()
    dx, dweights = draw(4, LENGTH, H * E)[:2], draw(4, LENGTH, H, 9)[:2]
    for found, exact in (
        ((of_x * dx).sum(), (along * expected(dx, weights, IDS, causal)).sum()),
        ((of_weights * dweights).sum(), (along * expected(x, dweights, IDS, causal)).sum()),
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-3)


def test_from_a_state_at_any_split():
    """Rows at different places, by any number of tokens, also none, with NaN in the padding."""
    count = 9
    x, weights = draw(2, LENGTH, H * E), draw(2, LENGTH, H, count)
    whole = expected(x, weights, ONE, True)
    starts, last = np.zeros(2, int), jnp.zeros((2, count - 1, H * E))
    for lengths in ((1, 0), (0, 2), (2, 36), (39, 1), (1, 1), (32, 35)):
        size = max(lengths)
        new_x, new_weights = (np.full((2, size, *y.shape[2:]), np.nan, np.float32) for y in (x, weights))
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            new_x[b, :length], new_weights[b, :length] = (y[b, start : start + length] for y in (x, weights))
        found, last = jax.jit(continue_dynamic_convolution)(new_x, new_weights, last, np.array(lengths))
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            np.testing.assert_allclose(found[b, :length], whole[b, start : start + length], rtol=1e-5, atol=1e-5)
        starts += lengths
    assert (starts == LENGTH).all()
    np.testing.assert_array_equal(last, x[:, 1 - count :])


def test_sums_are_float32():
    """Of 1 and 32 times 2^-9, sums in bfloat16 would keep the 1 alone."""
    x = np.full((1, 33, H * E), 2.0**-9, np.float32)
    x[:, 0] = 1
    found = run(x.astype(jnp.bfloat16), np.ones((1, 33, H, 33), np.float32), np.ones((1, 33), np.int32), causal=True)
    assert found.dtype == jnp.bfloat16 and float(found[0, -1, 0]) == 1 + 32 * 2.0**-9


@pytest.mark.parametrize(("causal", "used"), [(True, [3, 4, 5]), (False, [2, 3, 4])], ids=["causal", "centred"])
def test_softmax_over_a_layers_own_taps(causal, used):
    """Three of six: the last ones, or those around the token's own, which is the fourth."""
    scores = draw(1, 1, H, 6)
    found = np.asarray(softmax_of_taps(scores, jnp.int32(3), causal=causal))
    exact = np.zeros((1, 1, H, 6))
    exact[..., used] = np.exp(scores[..., used]) / np.exp(scores[..., used]).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_large_scores_of_taps_that_are_not_used():
    scores = np.array([[[[1e30, -1e30, 1.0, 2.0]]]], np.float32)
    of_first = lambda scores: softmax_of_taps(scores, jnp.int32(2), causal=True)[..., 2].sum()
    found, grad = jax.value_and_grad(of_first)(scores)
    assert float(found) == pytest.approx(1 / (1 + np.e), rel=1e-5)
    assert np.isfinite(grad).all() and not np.asarray(grad)[..., :2].any()
