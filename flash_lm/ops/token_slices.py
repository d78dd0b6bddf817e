"""Slices of a batch's tokens, so that logits over a large vocabulary exist for few tokens at a time."""

import jax
import jax.numpy as jnp

from flash_lm.ops.gather_tokens import index_chosen
from flash_lm.ops.target import target_platform

_FEWEST_TOKENS = 1024  # of a slice whose size is open
_SLICE_BYTES = 2**30  # of its float32 logits, on a GPU or TPU


class TokenSlices:
    """Slices of a batch along L; the batch stays sharded over devices.

    If few tokens count, they come first in each sequence, and `count` is the number of slices with one of them.
    """

    def __init__(self, weights_BxL: jax.Array, words: int, chunk: int | None, parts: int, few_targets: bool):
        """Slices for the weights of a batch's targets; the other arguments are those of `cross_entropy`."""
        (self._batch, self._length), self.parts = weights_BxL.shape, parts
        tokens = (chunk or slice_tokens(words, few_targets)) * parts
        self._size = min(max(tokens // self._batch, 1), self._length)
        self._counted = index_chosen(weights_BxL > 0, self._length) if few_targets else None

    @property
    def count(self) -> int | jax.Array:
        """Number of slices to compute: of all tokens, or of those that count."""
        tokens = self._length if self._counted is None else self._counted.before_BxM[:, -1].max()
        return -(-tokens // self._size)

    def cut(self, x_BxLx: jax.Array) -> jax.Array:
        """B×L×… -> B×G×S×…, G slices of S tokens of each sequence."""
        more = x_BxLx.shape[2:]
        if self._counted is not None:
            x_BxLx = self._counted.take(x_BxLx.reshape(self._batch, 1, self._length, -1)).reshape(x_BxLx.shape)
        padded = jnp.pad(x_BxLx, [(0, 0), (0, -self._length % self._size)] + [(0, 0)] * len(more))
        return padded.reshape(self._batch, -1, self._size, *more)

    def take(self, x_BxGxSx: jax.Array, i: jax.Array) -> jax.Array:
        """One slice, P×N×…; one dimension of tokens, as XLA's CPU backend is slow at products that sum over two."""
        x_BxSx = jax.lax.dynamic_index_in_dim(x_BxGxSx, i, axis=1, keepdims=False)
        return x_BxSx.reshape(self.parts, -1, *x_BxSx.shape[2:])

    def put(self, x_BxGxSx: jax.Array, slice_PxNx: jax.Array, i: jax.Array) -> jax.Array:
        """The same with another slice, the inverse of `take`."""
        slice_BxSx = slice_PxNx.reshape(self._batch, self._size, *slice_PxNx.shape[2:])
        return jax.lax.dynamic_update_index_in_dim(x_BxGxSx, slice_BxSx, i, axis=1)

    def join(self, x_BxGxSx: jax.Array) -> jax.Array:
        """Inverse of `cut`; if few tokens count, the others have what one of them has."""
        more = x_BxGxSx.shape[3:]
        x_BxLx = x_BxGxSx.reshape(self._batch, -1, *more)[:, : self._length]
        if self._counted is None:
            return x_BxLx
        return self._counted.put_back(x_BxLx.reshape(self._batch, 1, self._length, -1)).reshape(x_BxLx.shape)


def slice_tokens(words: int, few_targets: bool = False) -> int:
    """Tokens per device in a slice of the loss, for a vocabulary of so many words.

    On a CPU the logits of 1024 tokens stay in its cache. On a GPU or TPU they do not, and each slice reads the table
    twice, and reads and writes its float32 gradient: 12 V D bytes in half precision, where the logits move 16 V to 22 V
    bytes a token. So a slice is as large as memory allows: a power of two, with float32 logits of 1 GiB at most. If few
    tokens count, slices are small everywhere, since the last one is computed completely.
    """
    tokens = _FEWEST_TOKENS
    while target_platform() != "cpu" and not few_targets and 2 * tokens * 4 * words <= _SLICE_BYTES:
        tokens *= 2
    return tokens
