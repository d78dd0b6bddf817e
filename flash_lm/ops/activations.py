"""Activation functions that keep their inputs for the derivative, and nothing of what is between.

It is cheaper to compute again than to write and to read: of GELU, in bfloat16, five arrays as large as the input.
"""

import jax


@jax.checkpoint
def gelu(x: jax.Array) -> jax.Array:
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³))) ("Gaussian Error Linear Units", Hendrycks and Gimpel 2016)."""
    return jax.nn.gelu(x)


@jax.checkpoint
def silu(x: jax.Array) -> jax.Array:
    """X σ(x) (ibid.; also called swish)."""
    return jax.nn.silu(x)


@jax.checkpoint
def gated(gate: jax.Array, x: jax.Array) -> jax.Array:
    """silu(gate) ⊙ x."""
    return jax.nn.silu(gate) * x
