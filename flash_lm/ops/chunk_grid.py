"""Aligns new tokens with the chunk grid for prefill that starts anywhere in a chunk, after the tokens in the state.

A state holds the tokens of the current chunk, and perhaps of the chunks before it: position p is in slot p mod M of M
slots. Slots at and after the current position are outdated and never read.
"""

import jax
import jax.numpy as jnp

from flash_lm.ops.visibility import KeySpan


class ChunkGrid:
    """T grid positions from the first chunk in the state: its tokens, then the new ones.

    Attributes:
        index_1xT: the grid positions.
        real_BxT: which grid positions hold a token.
        earlier_BxT: number of tokens in the chunks before that of each grid position.
    """

    def __init__(self, chunk_size: int, held: int, length: int, start_B: jax.Array, lengths_B: jax.Array):
        """A grid for sequences whose state holds this many chunks.

        Args:
            chunk_size: C.
            held: chunks in the state, the current one included.
            length: L, new tokens and padding.
            start_B: position of the first new token of each sequence.
            lengths_B: number of new tokens, 0 … L.
        """
        self.chunk_size, self.held, self.length = chunk_size, held, length
        self.size = chunk_size * (held + -(-length // chunk_size))
        index_B = start_B % chunk_size + (held - 1) * chunk_size
        self.first_B = start_B - index_B  # position of the first grid position; below 0 if fewer chunks came before
        self.index_1xT = jnp.arange(self.size, dtype=jnp.int32)[None]
        self._source_BxT = self.index_1xT - index_B[:, None]  # index of the new token at each grid position
        self._old_BxT = self._source_BxT < 0
        self._new_BxT = ~self._old_BxT & (self._source_BxT < lengths_B[:, None])
        self._start_BxT = jnp.maximum(-self.first_B, 0)[:, None]
        self.real_BxT = (self._old_BxT & (self.index_1xT >= self._start_BxT)) | self._new_BxT
        self.earlier_BxT = jnp.maximum(self.first_B[:, None] + self.index_1xT - self.index_1xT % chunk_size, 0)
        self._target_BxL = index_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        self._last_chunk_B = (index_B + lengths_B) // chunk_size

    def key_span(self) -> KeySpan:
        """The part of the grid that each token sees, B×T: its sequence up to itself; other positions see nothing."""
        stop_BxT = jnp.where(self.real_BxT, self.index_1xT + 1, self._start_BxT)
        return KeySpan(self.index_1xT, jnp.broadcast_to(self._start_BxT, stop_BxT.shape), stop_BxT)

    def put(self, new_BxHxLx: jax.Array) -> jax.Array:
        """The new tokens on the grid, zeros elsewhere: B×H×T×…."""
        source_BxT = self._source_BxT.clip(0, self.length - 1)
        return jnp.where(self._new_BxT[:, None, :, None], _take(new_BxHxLx, source_BxT), 0)

    def put_after(self, held_BxHxMx: jax.Array, new_BxHxLx: jax.Array) -> jax.Array:
        """`put`, preceded by the tokens of a state."""
        slots = held_BxHxMx.shape[2]
        if self.held > 1:  # with one chunk, slots are grid positions
            slot_BxM = (self.first_B[:, None] + jnp.arange(slots, dtype=jnp.int32)[None]) % slots
            held_BxHxMx = _take(held_BxHxMx, slot_BxM)
        old_BxHxTx = jnp.pad(held_BxHxMx, ((0, 0), (0, 0), (0, self.size - slots), (0, 0)))
        return jnp.where(self._old_BxT[:, None, :, None], old_BxHxTx.astype(new_BxHxLx.dtype), self.put(new_BxHxLx))

    def take(self, x_BxHxTx: jax.Array) -> jax.Array:
        """The values at the new tokens: B×H×L×…."""
        return _take(x_BxHxTx, self._target_BxL)

    def take_last(self, x_BxHxTx: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The tokens for the state after the new ones: B×H×M×…, in slots."""
        slots = self.held * self.chunk_size
        begin_Bx1 = ((self._last_chunk_B - self.held + 1) * self.chunk_size)[:, None]
        slot_1xM = jnp.arange(slots, dtype=jnp.int32)[None]
        return _take(x_BxHxTx, begin_Bx1 + (slot_1xM - self.first_B[:, None] - begin_Bx1) % slots).astype(dtype)

    def take_last_chunk(self, x_BxHxGx: jax.Array) -> jax.Array:
        """The value of the chunk in which each sequence ends: B×H×…."""
        return x_BxHxGx[jnp.arange(self._last_chunk_B.size), :, self._last_chunk_B]


def _take(x_BxHxMx: jax.Array, index_BxN: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxHxMx, index_BxN[:, None, :, None], axis=2)
