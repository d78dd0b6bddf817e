"""The inverse of a lower triangular matrix with ones on its diagonal, by substitution in blocks.

[[P, 0], [R, Q]]⁻¹ = [[P⁻¹, 0], [−Q⁻¹ R P⁻¹, Q⁻¹]], from blocks of one number up: each block is an inverse itself, so
nothing exceeds the size of the result, as powers of the matrix would. JAX's triangular solve is LAPACK's on a CPU: a
training step with it hung after a few calls (jax 0.10.2, 2 threads).
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def unit_inverse(below_xCxC: jax.Array) -> jax.Array:
    """(I + A)⁻¹, (…, C, C) float32.

    Args:
        below_xCxC: A, float32; only entries below the diagonal are read.
    """
    count = below_xCxC.shape[-1]
    padded = 1 << max(count - 1, 0).bit_length()
    missing = padded - count
    # Pad to a power of two with zeros, which adds an identity block to the matrix.
    below = jnp.pad(below_xCxC, [(0, 0)] * (below_xCxC.ndim - 2) + [(0, missing)] * 2).reshape(-1, padded, padded)
    inverse_NxGxSxS = jnp.ones((len(below), padded, 1, 1), jnp.float32)
    size = 1
    while size < padded:
        blocks_NxGx2Sx2S = _on_diagonal(below, 2 * size)
        first, second = inverse_NxGxSxS[:, ::2], inverse_NxGxSxS[:, 1::2]
        corner = -_product(_product(second, blocks_NxGx2Sx2S[..., size:, :size]), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse_NxGxSxS = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse_NxGxSxS[:, 0, :count, :count].reshape(below_xCxC.shape)


def _backward(inverse_xCxC: jax.Array, d_inverse: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse_xCxC, -1, -2)
    below = jnp.tri(inverse_xCxC.shape[-1], k=-1, dtype=jnp.float32)
    d_below = -_product(_product(transposed, d_inverse), transposed)
    return (d_below * below.reshape(*[1] * (d_below.ndim - 2), *below.shape),)


unit_inverse.defvjp(lambda below: (unit_inverse(below),) * 2, _backward)


def _on_diagonal(x_NxCxC: jax.Array, size: int) -> jax.Array:
    """The blocks of this size on the diagonal, N×G×S×S."""
    starts = range(0, x_NxCxC.shape[-1], size)
    return jnp.stack([x_NxCxC[:, i : i + size, i : i + size] for i in starts], axis=1)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)  # an accelerator's default would round
