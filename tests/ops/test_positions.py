"""Rotary tables, sinusoids and T5's buckets against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import positions as oracle

from flash_lm.ops.positions import rotary_table, rotate, sinusoid, t5_bucket

POSITIONS = np.array([[0, 1, 2, 3, 10, 63], [5, 4, 3, 2, 1, 0]], np.int32)


@pytest.mark.parametrize("width", [2, 8, 64])
def test_rotate(width):
    x = np.random.default_rng(0).normal(size=(2, 3, 6, width)).astype(np.float32)
    actual = np.asarray(jax.jit(lambda x, positions: rotate(x, rotary_table(positions, width)))(x, POSITIONS))
    for b, h, t in np.ndindex(2, 3, 6):
        np.testing.assert_allclose(actual[b, h, t], oracle.rope(x[b, h, t].astype(float), POSITIONS[b, t]), atol=2e-5)


def test_rotate_keeps_the_dtype_and_computes_in_float32():
    x = np.random.default_rng(0).normal(size=(1, 1, 1, 64)).astype(np.float32)
    table = rotary_table(jnp.array([[4000]], jnp.int32), 64)
    exact, rounded = rotate(jnp.asarray(x), table), rotate(jnp.asarray(x, jnp.bfloat16), table)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.03)


@pytest.mark.parametrize("width", [4, 32])
def test_sinusoid(width):
    actual = np.asarray(jax.jit(sinusoid, static_argnums=1)(POSITIONS, width))
    for b, t in np.ndindex(2, 6):
        np.testing.assert_allclose(actual[b, t], oracle.sinusoid(POSITIONS[b, t], width), atol=1e-5)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20)])
@pytest.mark.parametrize("causal", [True, False])
def test_t5_bucket(causal, buckets, max_distance):
    """Every distance to well beyond the last border; rounding must not move a border."""
    distances = np.arange(-300, 301, dtype=np.int32)
    bucket = jax.jit(lambda x: t5_bucket(x, causal=causal, buckets=buckets, max_distance=max_distance))
    expected = [oracle.t5_bucket(distance, causal, buckets, max_distance) for distance in distances.tolist()]
    np.testing.assert_array_equal(bucket(distances), expected)
    assert set(expected) == set(range(buckets)) - (set() if causal else {buckets // 2})


def test_t5_bucket_by_hand():
    """With 32 causal buckets distance 16 is the first logarithmic bucket; 128 and more are in the last."""
    distances = [0, -1, -15, -16, -127, -128, -1000, 3]
    buckets = t5_bucket(jnp.array(distances, jnp.int32), causal=True, buckets=32, max_distance=128)
    np.testing.assert_array_equal(buckets, [0, 1, 15, 16, 31, 31, 31, 0])
