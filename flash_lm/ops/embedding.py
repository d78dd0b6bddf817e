"""The lookup of tokens in a table that is sharded over the devices of a mesh."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flash_lm.ops.on_mesh import batch_parts, gather_table, sum_parts


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed_tokens(table_VxD: jax.Array, tokens_BxL: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The rows of the table that the tokens name, rounded to a dtype; B×L×D.

    On a mesh the table is rounded before it is gathered. The gradient is summed in float32, on each device and then
    over devices.

    Args:
        table_VxD: the embedding.
        tokens_BxL: token ids; one outside the vocabulary gives NaN.
        dtype: of the result.
    """
    # Clamping a token outside the vocabulary would silently give a wrong answer.
    return gather_table(table_VxD, dtype).at[tokens_BxL].get(mode="fill", fill_value=jnp.nan)


def _forward(table_VxD, tokens_BxL, dtype):
    return embed_tokens(table_VxD, tokens_BxL, dtype), (tokens_BxL, table_VxD)


def _backward(dtype, kept, d_x_BxLxD):
    del dtype
    tokens_BxL, table_VxD = kept
    # Each device adds up its own sequences; one exchange of the sums follows.
    parts = batch_parts(len(tokens_BxL))
    tokens_PxN = tokens_BxL.reshape(parts, -1)
    d_x_PxNxD = d_x_BxLxD.astype(jnp.float32).reshape(*tokens_PxN.shape, -1)
    zeros_VxD = jnp.zeros(table_VxD.shape, jnp.float32)
    add = lambda tokens_N, d_x_NxD: zeros_VxD.at[tokens_N].add(d_x_NxD, mode="drop")
    d_table_PxVxD = jax.vmap(add)(tokens_PxN, d_x_PxNxD)
    return sum_parts(d_table_PxVxD).astype(table_VxD.dtype), None


embed_tokens.defvjp(_forward, _backward)
