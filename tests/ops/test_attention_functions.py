"""Attention functions and their gradients against the oracle, with masks and extreme scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.attention_functions import weights

from flash_lm.ops.attention_functions import ATTENTION_FUNCTIONS, laplace, masked_softmax, relu2

FUNCTIONS = ("relu2", "laplace", "softmax")
SCORES = np.random.default_rng(0).normal(size=(6, 9)).astype(np.float32) * 3
VISIBLE = np.random.default_rng(1).random((6, 9)) < 0.5
VISIBLE[0] = False
VISIBLE[1] = np.arange(9) == 4
DIVISOR = np.arange(1, 7, dtype=np.float32)[:, None]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_weights(function):
    actual = np.asarray(jax.jit(ATTENTION_FUNCTIONS[function])(SCORES, VISIBLE, DIVISOR))
    expected = np.zeros(SCORES.shape)
    for t in range(1, 6):
        expected[t, VISIBLE[t]] = weights(function, SCORES[t, VISIBLE[t]].astype(np.float64).tolist(), t + 1)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert (actual[~VISIBLE] == 0).all(), "hidden keys have no weight, and a query without keys has none at all"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients(function):
    """Equal to central differences in float64; finite where nothing is visible, and zero at hidden keys."""
    direction = np.random.default_rng(2).normal(size=SCORES.shape)
    weighted_sum = lambda x: (ATTENTION_FUNCTIONS[function](x, VISIBLE, DIVISOR) * direction.astype(np.float32)).sum()
    gradients = np.asarray(jax.jit(jax.grad(weighted_sum))(SCORES))
    assert (gradients[~VISIBLE] == 0).all()
    step = 1e-5
    for t in range(1, 6):
        keys = np.flatnonzero(VISIBLE[t])
        scores = SCORES[t, keys].astype(np.float64)
        for i, key in enumerate(keys):
            shift = step * np.eye(len(keys))[i]
            up, down = (weights(function, (scores + sign * shift).tolist(), t + 1) for sign in (1, -1))
            np.testing.assert_allclose(gradients[t, key], (up - down) @ direction[t, keys] / (2 * step), atol=1e-5)


def test_softmax_of_a_single_visible_key_is_constant():
    """Its weight is 1 at any score, so the derivative is 0; so it is for the first token of a causal sequence."""
    visible = np.eye(3, dtype=bool)
    grad = jax.jit(jax.grad(lambda x: masked_softmax(x, visible, np.ones((3, 1), np.float32))[0, 0]))
    np.testing.assert_array_equal(grad(np.ones((3, 3), np.float32)), 0)


def test_softmax_of_a_key_far_above_the_others_is_constant():
    """The other exponentials underflow, and the weight is 1 as for a single key."""
    grad = jax.jit(jax.grad(lambda x: masked_softmax(x, np.ones((1, 3), bool), np.ones((1, 1), np.float32))[0, 1]))
    np.testing.assert_array_equal(grad(np.array([[0.0, 200.0, 0.0]], np.float32)), 0)


def test_softmax_of_large_scores_is_finite():
    scores = jnp.array([[1e29, -1e29, 3e4], [-1e29, -1e29, 1e29]])
    output = np.asarray(masked_softmax(scores, np.array([[True] * 3, [True, True, False]]), jnp.ones((2, 1))))
    np.testing.assert_allclose(output, [[1, 0, 0], [0.5, 0.5, 0]])


def test_laplace_is_near_relu2_where_it_was_fitted():
    """Mega, section 3.4: at √½ both have the value ½ and the same slope."""
    x = jnp.float32(np.sqrt(0.5))
    assert float(laplace(x)) == pytest.approx(0.5) == pytest.approx(float(relu2(x)))
    assert float(jax.grad(laplace)(x)) == pytest.approx(float(jax.grad(relu2)(x)), rel=1e-5)
