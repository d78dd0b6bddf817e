"""Documents of packed sequences, as runs of equal segment ids."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Segments(NamedTuple):
    """The documents of each sequence. A document is a run of equal segment ids, so reusing an id is safe.

    runs_BxL: 0 for padding, otherwise the number of the run in its sequence, from 1.
    offsets_BxL: index of the token in its run.
    lengths_BxL: number of tokens in the run.
    """

    runs_BxL: jax.Array
    offsets_BxL: jax.Array
    lengths_BxL: jax.Array


def find_segments(segment_ids_BxL: jax.Array) -> Segments:
    """Finds the runs of equal segment ids; id 0 is padding."""
    index_1xL = jnp.arange(segment_ids_BxL.shape[1], dtype=jnp.int32)[None]
    changes_BxL = segment_ids_BxL[:, 1:] != segment_ids_BxL[:, :-1]
    first_BxL = jnp.pad(changes_BxL, ((0, 0), (1, 0)), constant_values=True)
    last_BxL = jnp.pad(changes_BxL, ((0, 0), (0, 1)), constant_values=True)
    start_BxL = jax.lax.cummax(jnp.where(first_BxL, index_1xL, 0), axis=1)
    end_BxL = jax.lax.cummin(jnp.where(last_BxL, index_1xL, index_1xL.size), axis=1, reverse=True)
    runs_BxL = jnp.where(segment_ids_BxL > 0, jnp.cumsum(first_BxL, axis=1, dtype=jnp.int32), 0)
    return Segments(runs_BxL, index_1xL - start_BxL, end_BxL - start_BxL + 1)


def prefix_segments(segments: Segments, prefix_BxL: jax.Array) -> Segments:
    """Prefixes of documents as documents, and all other tokens as padding.

    Args:
        segments: the documents of each sequence.
        prefix_BxL: length of the prefix of the token's document, (B or 1)×(L or 1).
    """
    inside_BxL = (segments.runs_BxL > 0) & (segments.offsets_BxL < prefix_BxL)
    runs_BxL = jnp.where(inside_BxL, segments.runs_BxL, 0)
    return Segments(runs_BxL, segments.offsets_BxL, jnp.minimum(segments.lengths_BxL, prefix_BxL))


def whole_row(length: int) -> Segments:
    """One document that fills the sequence; its arrays have a batch dimension of 1."""
    index_1xL = jnp.arange(length, dtype=jnp.int32)[None]
    return Segments(jnp.ones_like(index_1xL), index_1xL, jnp.full_like(index_1xL, length))
