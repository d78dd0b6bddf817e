"""Norms against the oracle."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import norms as oracle

from flash_lm.layers.norms import NORMS

WIDTH, EPSILON = 12, 1e-6


def build(name, epsilon=EPSILON):
    """Builds a norm with random parameters, and returns it with them in float64."""
    norm = NORMS[name](types.SimpleNamespace(model_dim=WIDTH, param_dtype="float32", norm_epsilon=epsilon))
    rng = np.random.default_rng(0)
    p = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), nnx.to_pure_dict(nnx.state(norm)))
    nnx.update(norm, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), p))
    return norm, p


@pytest.mark.parametrize(("size", "epsilon"), [(1e-5, EPSILON), (1, EPSILON), (30, EPSILON), (1e4, EPSILON), (1, 0.7)])
@pytest.mark.parametrize("name", NORMS)
def test_norm(name, size, epsilon):
    """Also for inputs so small that ε matters."""
    norm, p = build(name, epsilon)
    x = (np.random.default_rng(1).normal(size=(2, 3, WIDTH)) * size + 0.3 * size).astype(np.float32)
    actual = np.asarray(norm(jnp.asarray(x)))
    for b in range(2):
        expected = oracle.normalise(name, x[b].astype(np.float64), p, epsilon)
        np.testing.assert_allclose(actual[b], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NORMS)
def test_zeros_have_finite_gradients(name):
    """A padded or dropped token is all zeros."""
    norm, _ = build(name)
    grad = jax.jit(jax.grad(lambda x: norm(x).sum()))
    assert np.isfinite(grad(np.zeros((1, 2, WIDTH), np.float32))).all()


@pytest.mark.parametrize("name", NORMS)
def test_bfloat16_is_normalised_in_float32(name):
    """Only the input and the output are rounded."""
    norm, _ = build(name)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 3, WIDTH)), jnp.bfloat16)
    actual = norm(x)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, norm(x.astype(jnp.float32)).astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_gradients_and_what_is_kept_for_them(name):
    """Gradients are those of float64 differences; of a vector only itself, its mean and its deviation are kept."""
    norm, p = build(name)
    x = np.random.default_rng(3).normal(size=(1, 3, WIDTH))
    weights = np.random.default_rng(4).normal(size=x.shape)
    gradient = jax.grad(lambda x: (norm(x) * weights).sum())(jnp.asarray(x, jnp.float32))
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = 1e-6
        up, down = (oracle.normalise(name, (x + sign * step)[0], p, EPSILON) for sign in (1, -1))
        assert gradient[i] == pytest.approx(((up - down) * weights[0]).sum() / 2e-6, rel=1e-4, abs=1e-5)
    rounded = jnp.asarray(np.ones((1, 40, WIDTH)), jnp.bfloat16)
    kept = jax.tree.leaves(jax.vjp(norm, rounded)[1])
    assert sum(x.nbytes for x in kept if x.size >= 40) <= rounded.nbytes + 2 * 40 * 4
