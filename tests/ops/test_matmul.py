"""The folded matrix product against einsum."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.matmul import add_bias, matmul, project


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_gradients_of_bfloat16_are_products_of_bfloat16(transpose_a, transpose_b, dtype):
    """The gradient of Σ w · (a b) is w bᵀ and aᵀ w; operands are rounded, and nothing is written as float32."""
    rng = np.random.default_rng(0)
    round_ = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    a, b, w = (round_(rng.normal(size=shape)) for shape in ((2, 4, 5), (2, 5, 6), (2, 4, 6)))
    turn = lambda x, turned: np.swapaxes(x, -1, -2) if turned else x
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "dtype": dtype}

    def total(a, b):
        return (matmul(a, b, **options).astype(jnp.float32) * jnp.asarray(w, jnp.float32)).sum()

    arrays = [jnp.asarray(turn(a, transpose_a), jnp.bfloat16), jnp.asarray(turn(b, transpose_b), jnp.bfloat16)]
    assert matmul(*arrays, **options).dtype == dtype
    d_a, d_b = jax.grad(total, (0, 1))(*arrays)
    np.testing.assert_allclose(np.asarray(d_a, np.float64), turn(w @ np.swapaxes(b, 1, 2), transpose_a), rtol=2**-8)
    np.testing.assert_allclose(np.asarray(d_b, np.float64), turn(np.swapaxes(a, 1, 2) @ w, transpose_b), rtol=2**-8)
    derivative = jax.make_jaxpr(jax.grad(total, (0, 1)))(*arrays)
    products = [x for x in derivative.jaxpr.eqns if x.primitive.name == "dot_general"]
    assert len(products) >= 2
    for product in products[-2:]:
        assert {x.aval.dtype for x in (*product.invars, *product.outvars)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", None])
def test_devices_add_up_gradients_of_a_projection_in_the_asked_dtype(grad_dtype):
    """Each of eight devices adds 2^-9 to the gradient 1, which bfloat16 would round away."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.full((8, 1), 2.0**-9, jnp.bfloat16).at[0].set(1), rows)
    d_y, kernel = jax.device_put(jnp.ones((8, 3), jnp.bfloat16), rows), jnp.ones((1, 3))
    pull = lambda x, kernel, d_y: jax.vjp(lambda *a: project(*a, grad_dtype), x, kernel)[1](d_y)
    d_x, d_kernel = jax.jit(pull)(x, kernel, d_y)
    assert (d_x.dtype, d_kernel.dtype) == (jnp.bfloat16, jnp.float32) and (np.asarray(d_x) == 3).all()
    # XLA may leave out the rounding of a product, so its dtype is read from the lowered program.
    lowered = jax.jit(pull).lower(x, kernel, d_y).as_text()
    expected = {"float32": "f32", "bfloat16": "bf16", None: "bf16"}[grad_dtype]
    assert re.search(rf"dot_general.*contracting_dims = \[0\] x \[0\].*-> tensor<(1x3|3x1)x{expected}>", lowered)
    if grad_dtype == "float32":
        np.testing.assert_array_equal(d_kernel, np.full((1, 3), 1 + 7 * 2.0**-9))


def test_the_gradient_of_a_bias_is_a_float32_sum():
    """In bfloat16, a sum of ones would stop at 256."""
    y, bias = jnp.zeros((3000, 5), jnp.bfloat16), jnp.arange(5) / 3
    out, pull = jax.vjp(add_bias, y, bias)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, np.broadcast_to(bias.astype(jnp.bfloat16), out.shape))
    d_y, d_bias = pull(jnp.ones_like(out))
    assert (d_y.dtype, d_bias.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(d_bias, np.full(5, 3000))
    np.testing.assert_array_equal(d_y, np.ones(y.shape))
