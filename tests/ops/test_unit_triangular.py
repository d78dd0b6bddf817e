"""Inverses of unit triangular matrices against float64, also where powers of the matrix would overflow."""

import jax
import numpy as np
import pytest

from flash_lm.ops.unit_triangular import unit_inverse

inverse = jax.jit(unit_inverse)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 33])
def test_inverse(size):
    below = np.random.default_rng(size).standard_normal((3, 2, size, size)) * 0.3
    expected = np.linalg.inv(np.eye(size) + np.tril(below, -1))
    np.testing.assert_allclose(inverse(below.astype(np.float32)), expected, rtol=1e-4, atol=1e-4)


def test_ones_below_the_diagonal_are_exact():
    """The inverse has entries 0, 1 and −1; a power of the matrix has 5e17."""
    expected = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_array_equal(inverse(np.tril(np.ones((1, 64, 64), np.float32), -1))[0], expected)


def test_derivative():
    random, size, step = np.random.default_rng(0), 6, 1e-6
    below, direction, out_weights = (random.standard_normal((2, size, size)) for _ in range(3))
    value = lambda x: (np.linalg.inv(np.eye(size) + np.tril(x, -1)) * out_weights).sum()
    difference = (value(below + step * direction) - value(below - step * direction)) / (2 * step)
    grad = jax.jit(jax.grad(lambda x: (unit_inverse(x) * out_weights.astype(np.float32)).sum()))(np.float32(below))
    np.testing.assert_allclose((np.asarray(grad) * direction).sum(), difference, rtol=1e-3)
