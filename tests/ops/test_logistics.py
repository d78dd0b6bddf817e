"""The mixture of discretised logistics against its definition in float64."""

import jax
import numpy as np
import pytest

from flash_lm.ops.logistics import VALUES, mixture_log_probs

log_probs = jax.jit(mixture_log_probs)


def parameters(seed: int, spread: float) -> np.ndarray:
    """Draws 2×3 sets of four components; means reach from far below the first value to far above the last."""
    draw = np.random.default_rng(seed)
    logits, means, log_scales = draw.normal(size=(3, 2, 3, 4))
    return np.concatenate([logits, 1.5 * means, spread * log_scales - 2], axis=-1)


def oracle(parameters_x3P: np.ndarray) -> np.ndarray:
    """Probabilities, …×256, as differences of the distribution function."""
    logits, means, log_scales = np.split(parameters_x3P[..., None, :], 3, axis=-1)
    weights = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    x = (np.arange(VALUES) / 127.5 - 1)[:, None]
    cdf = lambda at: 1 / (1 + np.exp(-(at - means) / np.exp(log_scales)))
    upper, lower = cdf(x + 1 / 255), cdf(x - 1 / 255)
    upper[..., -1, :], lower[..., 0, :] = 1, 0
    return (weights * (upper - lower)).sum(axis=-1)


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_probabilities_are_those_of_the_definition(spread):
    parameters_x3P = parameters(0, spread)
    actual = np.asarray(log_probs(np.float32(parameters_x3P)[..., None, :], np.arange(VALUES)))
    expected = oracle(parameters_x3P)
    likely = expected > 1e-10  # below, the difference loses its digits to cancellation
    np.testing.assert_allclose(actual[likely], np.log(expected[likely]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.exp(actual).sum(axis=-1), 1, rtol=1e-5)


def test_one_value_per_position():
    parameters_x3P, values = np.float32(parameters(1, 0.5)), np.array([[0, 255, 17], [128, 1, 254]], np.int32)
    every = log_probs(parameters_x3P[..., None, :], np.arange(VALUES))
    expected = np.take_along_axis(np.asarray(every), values[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_probs(parameters_x3P, values), expected, rtol=1e-6)


def test_far_values_and_narrow_scales_stay_finite():
    """Also where a difference of two sigmoids is 0, and where a component is narrower than a value's bin."""
    value_and_gradient = jax.jit(jax.value_and_grad(mixture_log_probs))
    for mean, log_scale in ((5.0, -6.0), (-5.0, -6.0), (0.1, -50.0), (0.1, 20.0)):
        parameters_x3P = np.float32([0.0, mean, log_scale])
        for value in (0, 1, 100, 254, 255):
            result, gradient = value_and_gradient(parameters_x3P, np.int32(value))
            assert np.isfinite(result) and result <= 1e-6 and np.isfinite(gradient).all()
