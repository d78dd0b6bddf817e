"""Dynamic convolutions (taps per token) against their definition, within documents and continued from a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.segments import visibility

from flash_lm.ops.dynamic_convolution import continue_dynamic_convolution, dynamic_convolution, softmax_of_taps
from flash_lm.ops.segments import find_segments

H, E, LENGTH = 2, 3, 75
# Documents shorter than the filter, borders off every grid, padding between and at the end, a repeated id.
IDS = np.array([[4] * 37 + [0] * 2 + [4] * 2 + [1] + [2] * 31 + [0] * 2, [3] * LENGTH], np.int32)
ONE = np.ones_like(IDS)
RUNS = np.asarray(jax.jit(find_segments)(IDS).runs_BxL)
GARBAGE = 1e6
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "centred"])
run = jax.jit(dynamic_convolution, static_argnames="causal")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def expected(x, weights, ids: np.ndarray, causal: bool) -> np.ndarray:
    count = weights.shape[-1]
    center, out = count - 1 if causal else count // 2, np.zeros(x.shape)
    for b, row in enumerate(ids.tolist()):
        sees = visibility(row, causal)
        for t in range(len(row)):
            for u in range(max(0, t - center), min(len(row), t - center + count)):
                if sees(t, u):
                    head_outputs = x[b, u].reshape(H, E) * weights[b, t, :, u - t + center, None]
                    out[b, t] += head_outputs.reshape(-1)
    return out


@pytest.mark.parametrize("count", [1, 6, 40])
@both_ways
def test_values(causal, count):
    """In one or several blocks, with any padding, and with more taps than tokens in a document."""
    x, weights, keep = draw(2, LENGTH, H * E), draw(2, LENGTH, H, count), (IDS > 0)[..., None]
    for length in (1, 20, LENGTH):
        inputs = np.where(keep, x, GARBAGE).astype(np.float32)[:, :length]
        actual = np.asarray(run(inputs, weights[:, :length], RUNS[:, :length], causal=causal))
        exact = expected(x[:, :length], weights[:, :length], IDS[:, :length], causal)
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5)
        assert (actual[IDS[:, :length] == 0] == 0).all()


@both_ways
def test_taps_that_all_tokens_share(causal):
    x, taps_HxW = draw(2, LENGTH, H * E), draw(H, 9)
    actual = run(x, taps_HxW[None, None], RUNS, causal=causal)
    weights = np.broadcast_to(taps_HxW, (2, LENGTH, H, 9))
    np.testing.assert_allclose(actual, expected(x, weights, IDS, causal), rtol=1e-5, atol=1e-5)


@both_ways
def test_gradients(causal):
    """It is linear in both arguments: the derivative along a direction is the convolution of that direction."""
    x, weights, keep = draw(2, LENGTH, H * E), draw(2, LENGTH, H, 9), (IDS > 0)[..., None]
    out_weights = draw(3, LENGTH, H * E)[:2]
    loss = lambda x, weights: (out_weights * run(x, weights, RUNS, causal=causal)).sum()
    inputs = np.where(keep, x, GARBAGE).astype(np.float32)
    x_gradient, weights_gradient = map(np.asarray, jax.jit(jax.grad(loss, (0, 1)))(inputs, weights))
    assert (x_gradient[IDS == 0] == 0).all() and (weights_gradient[IDS == 0] == 0).all()
    dx, dweights = draw(4, LENGTH, H * E)[:2], draw(4, LENGTH, H, 9)[:2]
    for actual, exact in (
        ((x_gradient * dx).sum(), (out_weights * expected(dx, weights, IDS, causal)).sum()),
        ((weights_gradient * dweights).sum(), (out_weights * expected(x, dweights, IDS, causal)).sum()),
    ):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-3)


def test_from_a_state_at_any_split():
    """Sequences at different positions, any number of new tokens, also none, and NaN in the padding."""
    count = 9
    x, weights = draw(2, LENGTH, H * E), draw(2, LENGTH, H, count)
    full = expected(x, weights, ONE, True)
    starts, last = np.zeros(2, int), np.zeros((2, count - 1, H * E), np.float32)
    for lengths in ((1, 0), (0, 2), (2, 36), (39, 1), (1, 1), (32, 35)):
        size = max(lengths)
        new_x, new_weights = (np.full((2, size, *y.shape[2:]), np.nan, np.float32) for y in (x, weights))
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            new_x[b, :length], new_weights[b, :length] = (y[b, start : start + length] for y in (x, weights))
        actual, last = jax.jit(continue_dynamic_convolution)(new_x, new_weights, last, np.array(lengths))
        actual = np.asarray(actual)
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            np.testing.assert_allclose(actual[b, :length], full[b, start : start + length], rtol=1e-5, atol=1e-5)
        starts += lengths
    assert (starts == LENGTH).all()
    np.testing.assert_array_equal(last, x[:, 1 - count :])


def test_sums_are_float32():
    """A bfloat16 sum of 1 and 32 times 2^-9 would stay at 1."""
    x = np.full((1, 33, H * E), 2.0**-9, np.float32)
    x[:, 0] = 1
    actual = run(x.astype(jnp.bfloat16), np.ones((1, 33, H, 33), np.float32), np.ones((1, 33), np.int32), causal=True)
    assert actual.dtype == jnp.bfloat16 and float(actual[0, -1, 0]) == 1 + 32 * 2.0**-9


@pytest.mark.parametrize(("causal", "used"), [(True, [3, 4, 5]), (False, [2, 3, 4])], ids=["causal", "centred"])
def test_softmax_over_the_taps_of_a_layer(causal, used):
    """Three of six taps: the last ones if causal, or those around the fourth, which is the token itself."""
    scores = draw(1, 1, H, 6)
    actual = np.asarray(softmax_of_taps(scores, jnp.int32(3), causal=causal))
    exact = np.zeros((1, 1, H, 6))
    exact[..., used] = np.exp(scores[..., used]) / np.exp(scores[..., used]).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(actual, exact, rtol=1e-5)


def test_large_scores_of_taps_that_are_not_used():
    scores = np.array([[[[1e30, -1e30, 1.0, 2.0]]]], np.float32)
    first_weight = lambda scores: softmax_of_taps(scores, jnp.int32(2), causal=True)[..., 2].sum()
    weight, grad = jax.value_and_grad(first_weight)(scores)
    assert float(weight) == pytest.approx(1 / (1 + np.e), rel=1e-5)
    assert np.isfinite(grad).all() and not np.asarray(grad)[..., :2].any()
