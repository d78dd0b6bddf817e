"""The folded matrix product against einsum."""

import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.matmul import matmul


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("leading", [(2,), (2, 3), (2, 1, 3)])
def test_matmul(leading, transpose_a, transpose_b):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(*leading, 4, 5)).astype(np.float32), rng.normal(size=(*leading, 5, 6)).astype(np.float32)
    output = matmul(
        jnp.asarray(np.swapaxes(a, -1, -2) if transpose_a else a),
        jnp.asarray(np.swapaxes(b, -1, -2) if transpose_b else b),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )
    np.testing.assert_allclose(output, np.einsum("...lk,...km->...lm", a, b), atol=1e-5)


def test_accumulates_in_float32():
    """1 + 4096 · 2^-9 is 9; a bfloat16 sum would stay at 1, as 2^-9 is below half a unit."""
    a = jnp.ones((1, 1, 4097), jnp.bfloat16)
    b = jnp.full((1, 4097, 1), 2.0**-9, jnp.bfloat16).at[0, 0, 0].set(1)
    output = matmul(a, b)
    assert output.dtype == jnp.float32
    assert float(output[0, 0, 0]) == 9
