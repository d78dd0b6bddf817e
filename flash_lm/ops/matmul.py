"""Matrix products over folded batch dimensions, with float32 accumulators."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def matmul(
    a_xLxK: jax.Array,
    b_xKxM: jax.Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Multiplies the last two dimensions of two arrays that agree in all the others.

    Sums are float32 for any operands. The gradient of a product of two bfloat16 arrays is a product of bfloat16 arrays,
    too: the derivative of its result is rounded first, as those of activations are.

    Args:
        a_xLxK: (..., L, K), or (..., K, L) with `transpose_a`.
        b_xKxM: (..., K, M), or (..., M, K) with `transpose_b`.
        transpose_a: multiply with the transpose of a.
        transpose_b: multiply with the transpose of b.
        dtype: of the result; what is only read as bfloat16 need not be written as float32.

    Returns:
        (..., L, M).
    """
    leading = a_xLxK.shape[:-2]
    a_NxLxK = a_xLxK.reshape(-1, *a_xLxK.shape[-2:])
    b_NxKxM = b_xKxM.reshape(-1, *b_xKxM.shape[-2:])
    rounded = a_NxLxK.dtype == b_NxKxM.dtype and a_NxLxK.dtype.itemsize < 4
    arguments = a_NxLxK, b_NxKxM, transpose_a, transpose_b
    # Accumulators are float32 also where the result is not; cuBLAS may round the parts of a long sum that it splits.
    if rounded:
        out_NxLxM = _rounded_product(*arguments, jnp.dtype(dtype))
    else:
        out_NxLxM = _product(*arguments, jnp.dtype(jnp.float32)).astype(dtype)
    return out_NxLxM.reshape(*leading, *out_NxLxM.shape[1:])


def _product(a, b, transpose_a: bool, transpose_b: bool, dtype: jnp.dtype) -> jax.Array:
    contract = ((1 if transpose_a else 2,), (2 if transpose_b else 1,))
    return jax.lax.dot_general(a, b, (contract, ((0,), (0,))), preferred_element_type=dtype)


_rounded_product = jax.custom_vjp(_product, nondiff_argnums=(2, 3, 4))


def _backward(transpose_a: bool, transpose_b: bool, dtype: jnp.dtype, kept, d_out):
    a, b = kept
    d_out = d_out.astype(a.dtype)
    of_a = (b, d_out, transpose_b, True) if transpose_a else (d_out, b, False, not transpose_b)
    of_b = (d_out, a, True, transpose_a) if transpose_b else (a, d_out, not transpose_a, False)
    return _product(*of_a, a.dtype), _product(*of_b, b.dtype)


_rounded_product.defvjp(lambda a, b, *options: (_product(a, b, *options), (a, b)), _backward)


def project(x_NxK: jax.Array, kernel_KxM: jax.Array, grad_dtype: DTypeLike | None) -> jax.Array:
    """The projection x W, in the dtype of x.

    Args:
        x_NxK: one dimension of tokens.
        kernel_KxM: W.
        grad_dtype: in which the gradient of W leaves its product, and devices add up theirs; None: that of x.
    """
    if grad_dtype is None or jnp.dtype(grad_dtype) == x_NxK.dtype:
        return x_NxK @ kernel_KxM.astype(x_NxK.dtype)
    return _project(x_NxK, kernel_KxM, jnp.dtype(grad_dtype), kernel_KxM.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _project(x_NxK, kernel_KxM, grad_dtype: jnp.dtype, kernel_dtype: jnp.dtype):
    return _project_forward(x_NxK, kernel_KxM, grad_dtype, kernel_dtype)[0]


def _project_forward(x_NxK, kernel_KxM, grad_dtype, kernel_dtype):
    # The rounded W is kept: another rounding of it would be gathered again.
    rounded_KxM = kernel_KxM.astype(x_NxK.dtype)
    return x_NxK @ rounded_KxM, (x_NxK, rounded_KxM)


def _project_backward(grad_dtype, kernel_dtype, kept, d_NxM):
    x_NxK, rounded_KxM = kept
    d_x_NxK = jax.lax.dot_general(d_NxM, rounded_KxM, (((1,), (1,)), ((), ())))
    d_kernel_KxM = jax.lax.dot_general(x_NxK, d_NxM, (((0,), (0,)), ((), ())), preferred_element_type=grad_dtype)
    return d_x_NxK, d_kernel_KxM.astype(kernel_dtype)


_project.defvjp(_project_forward, _project_backward)


@jax.custom_vjp
def add_bias(y_NxM: jax.Array, bias_M: jax.Array) -> jax.Array:
    """Sum y + b, in the dtype of y.

    Args:
        y_NxM: one dimension of tokens.
        bias_M: b; it is rounded to the dtype of y, and its gradient, a sum over all tokens, is not.
    """
    return y_NxM + bias_M.astype(y_NxM.dtype)[None]


def _bias_backward(bias_M, d_NxM):
    return d_NxM, sum_axis(d_NxM, -2)[0].astype(bias_M.dtype)


add_bias.defvjp(lambda y_NxM, bias_M: (add_bias(y_NxM, bias_M), bias_M), _bias_backward)


def sum_axis(x_xLxM: jax.Array, axis: int) -> jax.Array:
    """Σ over the last dimension but one (-2) or the last (-1), which stays with size 1; float32.

    As products with ones: XLA's CPU backend adds along a dimension one number at a time.
    """
    length, width = x_xLxM.shape[-2:]
    x_NxLxM = x_xLxM.reshape(-1, length, width).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST  # an accelerator's default would round the terms
    if axis == -1:
        sums = jnp.matmul(x_NxLxM.reshape(-1, width), jnp.ones((width, 1), jnp.float32), precision=highest)
        return sums.reshape(*x_xLxM.shape[:-1], 1)
    ones_Nx1xL = jnp.ones((len(x_NxLxM), 1, length), jnp.float32)
    return jnp.matmul(ones_Nx1xL, x_NxLxM, precision=highest).reshape(*x_xLxM.shape[:-2], 1, width)
