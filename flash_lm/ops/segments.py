"""Which tokens belong together: runs of equal segment ids, and how many keys a query can see in its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Segments(NamedTuple):
    """The documents of each row. A document is a run of equal segment ids, so that an id used again cannot leak.

    runs_BxL: 0 for padding, else the number of the run in its row, from 1.
    offsets_BxL: index of the token in its run.
    lengths_BxL: tokens in the run.
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


def whole_row(length: int) -> Segments:
    """One document that fills the row; its arrays have a batch dimension of 1."""
    index_1xL = jnp.arange(length, dtype=jnp.int32)[None]
    return Segments(jnp.ones_like(index_1xL), index_1xL, jnp.full_like(index_1xL, length))


def visible_keys(segments: Segments, causal: bool) -> jax.Array:
    """Number of keys that each query can see in its document, B×L."""
    return segments.offsets_BxL + 1 if causal else segments.lengths_BxL


def visible_keys_in_chunk(
    segments: Segments, chunk_size: int, causal: bool, reach: tuple[int, ...] = (0,)
) -> jax.Array:
    """Number of keys that each query can see in its document and the chunks of `reach`, counted from its own, B×L."""
    index_1xL = jnp.arange(segments.offsets_BxL.shape[1], dtype=jnp.int32)[None]
    in_chunk_1xL = index_1xL % chunk_size
    before_BxL = jnp.minimum(segments.offsets_BxL, in_chunk_1xL - min(reach) * chunk_size)
    if causal:
        return before_BxL + 1
    to_end_1xL = (max(reach) + 1) * chunk_size - 1 - in_chunk_1xL
    after_BxL = jnp.minimum(segments.lengths_BxL - 1 - segments.offsets_BxL, to_end_1xL)
    return before_BxL + 1 + after_BxL


def tokens_in_earlier_chunks(segments: Segments, chunk_size: int) -> jax.Array:
    """Number of tokens of each query's document in the chunks before its own, B×L."""
    index_1xL = jnp.arange(segments.offsets_BxL.shape[1], dtype=jnp.int32)[None]
    return jnp.maximum(segments.offsets_BxL - index_1xL % chunk_size, 0)
