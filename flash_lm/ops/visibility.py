"""Attention masks as one span of visible keys per query, for all forms: quadratic, blocks, chunks, kernels, decoding.

Documents are contiguous, a causal query looks back, a sliding window contains near keys, and a prefix is the start of
a document. So a query always sees one span of keys, and masks, counts and blocks to visit all follow from its two ends.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.segments import Segments


class KeySpan(NamedTuple):
    """The span of keys that each query sees; arrays are (B or 1)×L int32.

    index_BxL: index of the query, on the same scale as those of the keys.
    first_BxL: index of the first key that it sees.
    stop_BxL: index after the last one; equal to `first_BxL` if it sees none.
    """

    index_BxL: jax.Array
    first_BxL: jax.Array
    stop_BxL: jax.Array

    def count(self) -> jax.Array:
        """The number of keys that each query sees, (B or 1)×L."""
        return self.stop_BxL - self.first_BxL

    def visible(self, keys_M: jax.Array) -> jax.Array:
        """Mask: which of the keys at these indices each query sees, (B or 1)×L×M."""
        keys = keys_M.reshape(*[1] * self.first_BxL.ndim, -1)
        return is_between(self.first_BxL[..., None], keys, self.stop_BxL[..., None])

    def clip_to_chunks(self, size: int, reach: tuple[int, ...] = (0,)) -> "KeySpan":
        """The part in the chunks of `reach`, relative to the query's chunk; indices count from the start of that."""
        start_BxL = self.index_BxL // size * size
        low, high = min(reach) * size, (max(reach) + 1) * size
        ends = (jnp.clip(end_BxL - start_BxL, low, high) for end_BxL in (self.first_BxL, self.stop_BxL))
        return KeySpan(self.index_BxL - start_BxL, *ends)

    def before_chunk(self, size: int) -> jax.Array:
        """The number of visible keys in the chunks before that of the query, (B or 1)×L."""
        start_BxL = self.index_BxL // size * size
        return jnp.maximum(jnp.minimum(self.stop_BxL, start_BxL) - self.first_BxL, 0)

    def after_chunk(self, size: int) -> jax.Array:
        """The number of visible keys in the chunks after that of the query, (B or 1)×L."""
        end_BxL = (self.index_BxL // size + 1) * size
        return jnp.maximum(self.stop_BxL - jnp.maximum(self.first_BxL, end_BxL), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskStructure:
    """What a `KeySpan` says per query, said of the sequence as a whole, as libraries for attention ask for it.

    Attributes:
        causal: static; no keys after the query, where queries and keys are the same tokens.
        window: static; only keys fewer than this many tokens away; None: any.
        lengths: number of keys of each sequence that are real, (B or 1); the rest is padding; None: all, or
            `documents` says it.
        documents: document of each query, (B or 1)×L, and of each key, (B or 1)×M, 0 for padding; None: sequences are
            not packed.
    """

    causal: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    lengths: jax.Array | None = None
    documents: tuple[jax.Array, jax.Array] | None = None

    def ids(self, batch: int, queries: int, keys: int) -> tuple[jax.Array, jax.Array] | None:
        """Ids of queries, B×L, and keys, B×M, that see each other only if they are equal; None: all do."""
        if self.documents is not None:
            of_q, of_k = self.documents
        elif self.lengths is not None:
            of_q = jnp.ones((1, queries), jnp.int32)
            of_k = (jnp.arange(keys, dtype=jnp.int32)[None] < self.lengths[:, None]).astype(jnp.int32)
        else:
            return None
        return jnp.broadcast_to(of_q, (batch, queries)), jnp.broadcast_to(of_k, (batch, keys))


def is_between(first: jax.Array, key: jax.Array, stop: jax.Array) -> jax.Array:
    """Whether the index of a key is in a span."""
    return (first <= key) & (key < stop)


def document_key_span(
    segments: Segments, *, causal: bool, window: int | jax.Array | None = None, prefix_BxL: jax.Array | None = None
) -> KeySpan:
    """Visibility in training: tokens see their document; padding sees nothing.

    Args:
        segments: the documents of each sequence.
        causal: no keys after the query.
        window: only keys fewer than this many tokens away, perhaps a traced number; None: any.
        prefix_BxL: number of first tokens of the query's document that all of the document sees, even ahead, (B or
            1)×L;
            None: none.
    """
    # The span is the document, cut at the query if causal, extended to the prefix, cut to the window.
    index_BxL = jnp.arange(segments.runs_BxL.shape[1], dtype=jnp.int32)[None]
    first_BxL = index_BxL - segments.offsets_BxL
    end_BxL = first_BxL + segments.lengths_BxL
    stop_BxL = index_BxL + 1 if causal else end_BxL
    if prefix_BxL is not None:
        stop_BxL = jnp.maximum(stop_BxL, jnp.minimum(first_BxL + prefix_BxL, end_BxL))
    return _clip_to_window(segments.runs_BxL > 0, index_BxL, first_BxL, stop_BxL, window)


def causal_key_span(
    index_BxL: jax.Array,
    real_BxL: jax.Array,
    window: int | jax.Array | None = None,
    prefix_BxL: jax.Array | None = None,
) -> KeySpan:
    """Visibility in decoding, one document per sequence: tokens see tokens up to themselves.

    Args:
        index_BxL: indices of the queries.
        real_BxL: which queries are not padding; padding sees nothing.
        window: only keys fewer than this many tokens away, perhaps a traced number; None: any.
        prefix_BxL: number of first tokens of the sequence that every token sees, even ahead, B×(L or 1); None: none.
    """
    stop_BxL = index_BxL + 1
    if prefix_BxL is not None:
        stop_BxL = jnp.maximum(stop_BxL, prefix_BxL)
    return _clip_to_window(real_BxL, index_BxL, jnp.zeros_like(index_BxL), stop_BxL, window)


def _clip_to_window(real_BxL, index_BxL, first_BxL, stop_BxL, window: int | jax.Array | None) -> KeySpan:
    if window is not None:
        first_BxL = jnp.maximum(first_BxL, index_BxL - window + 1)
        stop_BxL = jnp.minimum(stop_BxL, index_BxL + window)
    return KeySpan(index_BxL, *(jnp.where(real_BxL, end_BxL, index_BxL) for end_BxL in (first_BxL, stop_BxL)))
