"""Chunks as sequences of a batch, for implementations of attention that know nothing of chunks."""

import jax
import jax.numpy as jnp

from flash_lm.ops.chunks import head_chunks, head_rows, to_chunks
from flash_lm.ops.visibility import KeySpan, MaskStructure


def chunks_to_rows(x_BxHxLxK: jax.Array, size: int) -> jax.Array:
    """B×H×L×K -> (B·G)×H×C×K; the last chunk of a sequence is padded with zeros."""
    chunked_BxGxHxCxK = jnp.moveaxis(head_chunks(x_BxHxLxK, size), 2, 1)
    return chunked_BxGxHxCxK.reshape(-1, *chunked_BxGxHxCxK.shape[2:])


def rows_to_sequences(x_RxHxCxE: jax.Array, batch: int, length: int) -> jax.Array:
    """The inverse of `chunks_to_rows`: (B·G)×H×C×E -> B×H×L×E."""
    return head_rows(jnp.moveaxis(x_RxHxCxE.reshape(batch, -1, *x_RxHxCxE.shape[1:]), 1, 2), length)


def mask_of_chunks(
    key_span: KeySpan, structure: MaskStructure | None, size: int, batch: int
) -> tuple[KeySpan, MaskStructure | None]:
    """The part of a mask that is inside each chunk, for the rows of `chunks_to_rows`; without a window."""

    def rows(x_BxL: jax.Array) -> jax.Array:
        full_BxL = jnp.broadcast_to(x_BxL, (batch, x_BxL.shape[1]))
        return to_chunks(full_BxL, size).reshape(-1, size)

    inside = KeySpan(*(rows(x_BxL) for x_BxL in key_span.clip_to_chunks(size)))
    if structure is None:
        return inside, None
    lengths, documents = structure.lengths, structure.documents
    if lengths is not None:
        start_G = size * jnp.arange(len(inside.first_BxL) // batch, dtype=jnp.int32)
        lengths_B = jnp.broadcast_to(lengths, (batch,))
        lengths = jnp.clip(lengths_B[:, None] - start_G[None], 0, size).reshape(-1)
    if documents is not None:
        documents = (rows(documents[0]), rows(documents[1]))
    return inside, MaskStructure(causal=structure.causal, lengths=lengths, documents=documents)
