"""The features of a Taylor polynomial: products, number, range and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.taylor import taylor_features, taylor_width


@pytest.mark.parametrize("width", [1, 3, 16])
def test_products_are_the_polynomial(width):
    q, k = np.random.default_rng(width).standard_normal((2, 40, width))
    scores = q @ k.T / np.sqrt(width)
    q_features, k_features = (taylor_features(jnp.asarray(x, jnp.float32)) for x in (q, k))
    assert q_features.shape == (40, taylor_width(width)) and q_features.dtype == jnp.float32
    products = np.asarray(q_features, np.float64) @ np.asarray(k_features, np.float64).T
    np.testing.assert_allclose(products, 1 + scores + scores**2 / 2, rtol=1e-5, atol=1e-5)
    assert products.min() > 0.5 - 1e-5


def test_each_pair_occurs_once():
    """153 features for width 16; all ordered pairs would be 273."""
    assert taylor_width(16) == 153


def test_derivatives():
    """Derivative of the product along a direction, against that of the polynomial."""
    q, k, direction = np.random.default_rng(0).standard_normal((3, 4))
    product = lambda x: taylor_features(x) @ taylor_features(jnp.asarray(k, jnp.float32))
    tangent = jax.jvp(product, (jnp.asarray(q, jnp.float32),), (jnp.asarray(direction, jnp.float32),))[1]
    assert tangent == pytest.approx((1 + q @ k / 2) * (direction @ k) / 2, rel=1e-5)
