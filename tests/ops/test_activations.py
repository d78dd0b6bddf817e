"""Activations against the equations, and what they keep for the derivative."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.activations import gated, gelu, silu

X, GATE = np.random.default_rng(0).normal(size=(2, 3, 50)) * 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ORACLES = {
    silu: (lambda x: x * sigmoid(x), (X,)),
    gelu: (lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), (X,)),
    gated: (lambda gate, x: gate * sigmoid(gate) * x, (GATE, X)),
}


@pytest.mark.parametrize("function", ORACLES)
def test_activation(function):
    oracle, inputs = ORACLES[function]
    arrays = tuple(jnp.asarray(x, jnp.float32) for x in inputs)
    np.testing.assert_allclose(function(*arrays), oracle(*inputs), rtol=1e-5, atol=1e-6)
    # Gradients by differences of the float64 oracle.
    gradients, step = jax.grad(lambda *x: function(*x).sum(), tuple(range(len(arrays))))(*arrays), 1e-6
    for i, gradient in enumerate(gradients):
        up, down = (
            oracle(*(x + sign * step * (i == j) for j, x in enumerate(inputs))).astype(np.float64) for sign in (1, -1)
        )
        np.testing.assert_allclose(gradient, (up - down) / (2 * step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", ORACLES)
def test_only_the_inputs_are_kept(function):
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in ORACLES[function][1])
    kept = jax.tree.leaves(jax.vjp(function, *arrays)[1])
    assert sum(x.nbytes for x in kept) <= sum(x.nbytes for x in arrays)
