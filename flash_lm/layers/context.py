"""Context of a forward pass: positions, documents, padding, rotary tables and masks of the tokens; memory."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.core import Tracer

from flash_lm.errors import InputError
from flash_lm.ops.segments import Segments, find_segments, whole_row
from flash_lm.ops.visibility import KeySpan, MaskStructure, causal_key_span, document_key_span


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """A second sequence for cross attention, such as the output of an encoder.

    Attributes:
        x_BxMxD: its vectors.
        lengths_B: how many of them are real; the rest is padding.
        first_BxL: index of the first vector that each token sees.
        stop_BxL: index after the last one.
        documents: packed: document of each token, B×L, and of each vector, B×M.
        packed: static; a sequence may hold several documents, each with a separate part of the memory.
    """

    x_BxMxD: jax.Array
    lengths_B: jax.Array
    first_BxL: jax.Array
    stop_BxL: jax.Array
    documents: tuple[jax.Array, jax.Array] | None = None
    packed: bool = dataclasses.field(metadata={"static": True})

    def key_span(self) -> KeySpan:
        """The span of the memory that each token sees; positions of the tokens do not matter."""
        return KeySpan(jnp.zeros_like(self.first_BxL), self.first_BxL, self.stop_BxL)

    def structure(self) -> MaskStructure:
        """The same as `key_span`, in terms of the sequences: real vectors, or documents."""
        return MaskStructure(causal=False, lengths=None if self.packed else self.lengths_B, documents=self.documents)


def make_memory(
    x_BxMxD: jax.Array, memory_ids: jax.Array | None, segment_ids: jax.Array | None, length: int, *, packed: bool
) -> Memory:
    """The memory of full sequences, for the parallel form.

    Args:
        x_BxMxD: its vectors.
        memory_ids: B×M, the segment id of the tokens that see each vector, each a contiguous run, 0 = padding; None:
            all is seen.
        segment_ids: B×L, those of the tokens; None: one document per sequence.
        length: L.
        packed: False promises one document per sequence, with padding at its end, whatever the segment ids.
    """
    batch, size = x_BxMxD.shape[:2]
    memory_ids_BxM = jnp.ones((batch, size), jnp.int32) if memory_ids is None else memory_ids
    ids_BxL = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids
    # Without packing, real memory is a prefix; with packing, each document sees the run that has its id.
    lengths_B = (memory_ids_BxM > 0).sum(axis=1, dtype=jnp.int32)
    packed = packed and memory_ids is not None
    if packed:
        same_BxLxM = (memory_ids_BxM[:, None] == ids_BxL[:, :, None]) & (ids_BxL > 0)[:, :, None]
        first_BxL = same_BxLxM.argmax(axis=-1).astype(jnp.int32)
        stop_BxL = first_BxL + same_BxLxM.sum(axis=-1, dtype=jnp.int32)
    else:
        first_BxL = jnp.zeros_like(ids_BxL)
        stop_BxL = jnp.where(ids_BxL > 0, lengths_B[:, None], 0)
    return Memory(
        x_BxMxD=x_BxMxD,
        lengths_B=lengths_B,
        first_BxL=first_BxL,
        stop_BxL=stop_BxL,
        documents=(ids_BxL, memory_ids_BxM) if packed else None,
        packed=packed,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The positions and documents of the tokens of one call.

    Attributes:
        positions_BxL: position of each token in its document, (B or 1)×L int32.
        rotary: cosines and sines for `ops.positions.rotate`, by the width that they rotate.
        segments: the documents of each sequence; None in prefill and step, where a sequence is one document.
        lengths_B: prefill and step: tokens to consume per sequence; the rest is right padding.
        prefix_BxL: number of first tokens of each token's document that all of the document sees, even ahead, B×(L or
            1); None: none.
        memory: a second sequence for cross attention; None: none, or prefill and step, where the state has it.
        dropout_key: key for all randomness of this call; None: deterministic, without dropout.
        causal: static; a token sees only tokens up to itself.
        packed: static; a sequence may hold several documents; otherwise it is one document, perhaps padded.
    """

    positions_BxL: jax.Array
    rotary: Mapping[int, tuple[jax.Array, jax.Array]] = dataclasses.field(default_factory=dict)
    segments: Segments | None = None
    lengths_B: jax.Array | None = None
    prefix_BxL: jax.Array | None = None
    memory: Memory | None = None
    dropout_key: jax.Array | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    packed: bool = dataclasses.field(default=False, metadata={"static": True})

    def fold_in(self, number: int | jax.Array) -> "Context":
        """The context of one block, or of one sublayer, with a separate dropout key."""
        if self.dropout_key is None:
            return self
        return dataclasses.replace(self, dropout_key=jax.random.fold_in(self.dropout_key, number))

    def key_span(self, window: int | jax.Array | None = None) -> KeySpan:
        """The keys that each token sees: in training, in its document; in decoding, in its sequence up to itself.

        Args:
            window: only keys fewer than this many tokens away (sliding window); None: any.
        """
        if self.segments is not None:
            return document_key_span(self.segments, causal=self.causal, window=window, prefix_BxL=self.prefix_BxL)
        return causal_key_span(self.positions_BxL, self.real(), window, self.prefix_BxL)

    def structure(self, window: int | None = None) -> MaskStructure | None:
        """The same as `key_span`, in terms of the sequences; None: prefixes and decode states have none."""
        if self.segments is None or self.prefix_BxL is not None:
            return None
        runs_BxL = self.segments.runs_BxL
        if self.packed:
            return MaskStructure(causal=self.causal, window=window, documents=(runs_BxL, runs_BxL))
        # Padding is at the end of a sequence, where no causal query sees it.
        lengths = None if self.causal else (runs_BxL > 0).sum(axis=1, dtype=jnp.int32)
        return MaskStructure(causal=self.causal, window=window, lengths=lengths)

    def prefix_mask(self) -> jax.Array:
        """Prefill: which tokens are in the prefix of their sequence, B×L; the parallel form has `prefixes_of`."""
        assert self.prefix_BxL is not None
        return self.real() & (self.positions_BxL < self.prefix_BxL)

    def real(self) -> jax.Array:
        """Prefill and step: which tokens are consumed, that is, are not padding, B×L."""
        assert self.lengths_B is not None
        return jnp.arange(self.positions_BxL.shape[1])[None] < self.lengths_B[:, None]


def make_context(
    length: int,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    *,
    causal: bool,
    packed: bool = True,
    prefix_BxL: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> Context:
    """The context of full sequences, for the parallel form; the caller adds rotary tables.

    Args:
        length: L.
        segment_ids: B×L, 0 = padding, each document one contiguous run; None: one document per sequence.
        positions: B×L, position of each token in its document; None: counted from the document's start.
        causal: whether a token sees only tokens up to itself.
        packed: False promises one document per sequence, with padding at its end, whatever the segment ids.
        prefix_BxL: see `Context`.
        dropout_key: None: deterministic.
    """
    packed = packed and segment_ids is not None
    # Without segment ids all sequences are one document, so their masks have a batch dimension of 1.
    segments = whole_row(length) if segment_ids is None else find_segments(segment_ids)
    if positions is None:  # the same for all rows of one document; they do not matter at padding
        positions = segments.offsets_BxL if packed else whole_row(length).offsets_BxL
    return Context(
        positions_BxL=positions,
        segments=segments,
        prefix_BxL=prefix_BxL,
        dropout_key=dropout_key,
        causal=causal,
        packed=packed,
    )


def rows_beyond(end_B: jax.Array, limit: int | None, grows: bool, limit_key: str = "model.max_length") -> jax.Array:
    """Which sequences would exceed the decode state or the positions; inside jit this cannot raise an error.

    Args:
        end_B: tokens that each sequence would have.
        limit: the largest allowed number of tokens; None: any.
        grows: whether the limit is the state's capacity.
        limit_key: the key that sets another limit.

    Raises:
        ValueError: outside jit, a sequence would exceed the limit.
    """
    # Outside jit the error names the sequence; inside jit the caller turns its logits into NaN.
    beyond_B = jnp.zeros_like(end_B, bool) if limit is None else end_B > limit
    if not isinstance(beyond_B, Tracer) and beyond_B.any():
        advice = "give init_state a larger capacity" if grows else f"the positions end there ({limit_key})"
        raise ValueError(
            f"row {int(beyond_B.argmax())} would have {int(end_B.max())} tokens, more than the state's capacity of "
            f"{limit}: {advice}"
        )
    return beyond_B


def require_one_document(x_BxLxD: jax.Array, segments: Segments) -> jax.Array:
    """The input of a model that cannot separate documents; NaN in sequences that are not one document, perhaps padded.

    Raises:
        InputError: outside jit, instead of NaN.
    """
    # A token of one document has its index in the sequence as its offset.
    index_1xL = jnp.arange(x_BxLxD.shape[1], dtype=jnp.int32)[None]
    other_B = ((segments.runs_BxL > 0) & (segments.offsets_BxL != index_1xL)).any(axis=1)
    if not isinstance(other_B, Tracer) and other_B.any():
        raise InputError(
            f"row {int(other_B.argmax())} has several documents, or padding before its first: this family takes one "
            "document per sequence, padded at its end; give each document a separate sequence (data.pack=stream)"
        )
    return jnp.where(other_B[:, None, None], jnp.nan, x_BxLxD)
