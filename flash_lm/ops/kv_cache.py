"""KV cache of all tokens, and ring buffer of the last ones for sliding windows; both are written in place.

The size of a ring does not depend on the length of the text.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.visibility import KeySpan


def write(cache_BxHxMxK: jax.Array, new_BxHxLxK: jax.Array, slot_BxL: jax.Array) -> jax.Array:
    """Writes new tokens to their slots of a KV cache; tokens with a slot outside 0 … M − 1 are dropped."""
    batch, heads, length, _ = new_BxHxLxK.shape
    if batch * heads * length == 1:
        # XLA turns a single update into a slice update, does that twice (for the next token, and for the product
        # that reads it), and copies the cache each time: five times the work of a decoding step. With two updates, one
        # of them dropped, it does not.
        slot_BxL = jnp.pad(slot_BxL, ((0, 0), (0, 1)), constant_values=cache_BxHxMxK.shape[2])
        new_BxHxLxK = jnp.pad(new_BxHxLxK, ((0, 0), (0, 0), (0, 1), (0, 0)))
    # A scatter per sequence and head; slots out of range are dropped.
    rows_Bx1x1, heads_1xHx1 = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    slots = cache_BxHxMxK.at[rows_Bx1x1, heads_1xHx1, slot_BxL[:, None]]
    return slots.set(new_BxHxLxK.astype(cache_BxHxMxK.dtype), mode="drop")


class Ring(NamedTuple):
    """Ring buffer: keys and values of the last R tokens per sequence; position p is in slot p mod R."""

    key_BxHxRxK: jax.Array
    value_BxHxRxE: jax.Array

    @property
    def size(self) -> int:
        """R."""
        return self.key_BxHxRxK.shape[2]


def empty_ring(batch: int, heads: int, size: int, key_width: int, value_width: int, dtype: jnp.dtype) -> Ring:
    """A ring without tokens."""
    return Ring(*(jnp.zeros((batch, heads, size, width), dtype) for width in (key_width, value_width)))


def unroll_ring(ring: Ring, k_BxHxLxK: jax.Array, v_BxHxLxE: jax.Array, start_B: jax.Array) -> Ring:
    """Unrolls a ring, the oldest token first, and appends new tokens: R + L keys and values.

    The token at position p is at index p − start + R. Indices of positions below 0 hold no token.

    Args:
        ring: before the new tokens.
        k_BxHxLxK: their keys.
        v_BxHxLxE: their values.
        start_B: position of the first new token of each sequence.
    """
    # The oldest token is in the slot that the next token will take.
    slot_BxR = (start_B[:, None] + jnp.arange(ring.size, dtype=jnp.int32)[None]) % ring.size
    old = (_take_slots(x, slot_BxR) for x in ring)
    new = (x.astype(y.dtype) for x, y in zip((k_BxHxLxK, v_BxHxLxE), ring, strict=True))
    return Ring(*(jnp.concatenate(both, axis=2) for both in zip(old, new, strict=True)))


def unrolled_key_span(
    size: int, start_B: jax.Array, real_BxL: jax.Array, window: jax.Array, hidden: int = 0
) -> KeySpan:
    """Visibility of the result of `unroll_ring` for new tokens, one document per sequence: tokens up to themselves.

    Args:
        size: R.
        start_B: position of the first new token of each sequence.
        real_BxL: which new tokens are not padding.
        window: only keys fewer than this many tokens away, at most R + 1.
        hidden: positions below this are not seen.
    """
    index_BxL = jnp.broadcast_to(size + jnp.arange(real_BxL.shape[1], dtype=jnp.int32), real_BxL.shape)
    stop_BxL = jnp.where(real_BxL, index_BxL + 1, 0)
    first_BxL = jnp.maximum(index_BxL - window + 1, size - start_B[:, None] + hidden)
    return KeySpan(index_BxL, jnp.minimum(first_BxL, stop_BxL), stop_BxL)


def roll_ring(joined: Ring, size: int, start_B: jax.Array, lengths_B: jax.Array) -> Ring:
    """The ring of R = `size` tokens after the first `lengths_B` new ones, from the result of `unroll_ring`."""
    end_Bx1 = (start_B + lengths_B)[:, None]
    slot_1xR = jnp.arange(size, dtype=jnp.int32)[None]
    position_BxR = end_Bx1 - 1 - (end_Bx1 - 1 - slot_1xR) % size  # the last one of each slot
    index_BxR = position_BxR - start_B[:, None] + size
    return Ring(*(_take_slots(x, index_BxR) for x in joined))


def write_token(
    ring: Ring, k_BxHx1xK: jax.Array, v_BxHx1xE: jax.Array, position_B: jax.Array, real_B: jax.Array
) -> Ring:
    """The ring after one token per sequence, written in place; sequences that are not real stay as they are."""
    slot_Bx1 = jnp.where(real_B, position_B % ring.size, ring.size)[:, None]
    return Ring(*(write(old, new, slot_Bx1) for old, new in zip(ring, (k_BxHx1xK, v_BxHx1xE), strict=True)))


def positions_in(ring: Ring, position_B: jax.Array) -> jax.Array:
    """Positions of the tokens in the slots, B×R, if the last token is at `position_B`; below 0: empty."""
    slot_1xR = jnp.arange(ring.size, dtype=jnp.int32)[None]
    return position_B[:, None] - (position_B[:, None] - slot_1xR) % ring.size


def _take_slots(x_BxHxMxK: jax.Array, index_BxR: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxHxMxK, index_BxR[:, None, :, None], axis=2)
