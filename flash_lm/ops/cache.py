"""Writes new tokens to a cache of all tokens so far, in place."""

import jax
import jax.numpy as jnp


def write(cache_BxHxMxK: jax.Array, new_BxHxLxK: jax.Array, slot_BxL: jax.Array) -> jax.Array:
    """The cache with each row's new tokens in their slots; tokens with a slot outside 0 … M − 1 are dropped."""
    batch, heads, length, _ = new_BxHxLxK.shape
    if batch * heads * length == 1:
        # XLA turns a single update into a slice update, does that twice (for the next token, and for the product
        # that reads it), and copies the cache each time: five times the work of a decoding step. With two updates, one
        # of them dropped, it does not.
        slot_BxL = jnp.pad(slot_BxL, ((0, 0), (0, 1)), constant_values=cache_BxHxMxK.shape[2])
        new_BxHxLxK = jnp.pad(new_BxHxLxK, ((0, 0), (0, 0), (0, 1), (0, 0)))
    rows_Bx1x1, heads_1xHx1 = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    places = cache_BxHxMxK.at[rows_Bx1x1, heads_1xHx1, slot_BxL[:, None]]
    return places.set(new_BxHxLxK.astype(cache_BxHxMxK.dtype), mode="drop")
