"""`ModelInputs`: the arrays that a model reads from a batch."""

import dataclasses
from collections.abc import Mapping

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """The tokens of a batch, and their documents, positions, prefix and source.

    Attributes:
        tokens_BxL: token ids.
        segment_ids_BxL: 0 = padding, each document one contiguous run; None: one document per sequence.
        positions_BxL: position of each token in its document; None: counted from the document's start.
        prefix_BxL: number of first tokens of a token's document that all of the document sees, even ahead, B×(L or 1)
            int32; None: none.
        source_BxM: token ids for the encoder, whose features every token sees; None: the model has no encoder.
        source_segment_ids_BxM: for each source token, the segment id of the tokens that see it, 0 = padding; None:
            all tokens see it.
        packed: static. False promises one document per sequence, with padding at its end: bidirectional linear
            attention then needs one pass over the sequence instead of three.
    """

    tokens_BxL: jax.Array
    segment_ids_BxL: jax.Array | None = None
    positions_BxL: jax.Array | None = None
    prefix_BxL: jax.Array | None = None
    source_BxM: jax.Array | None = None
    source_segment_ids_BxM: jax.Array | None = None
    packed: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def from_batch(cls, batch: Mapping[str, jax.Array], *, packed: bool = True) -> "ModelInputs":
        """The inputs in a batch from `data`; the task decides which of the optional arrays it has."""
        return cls(
            batch["inputs_BxL"],
            batch["segment_ids_BxL"],
            batch["positions_BxL"],
            batch.get("prefix_BxL"),
            batch.get("source_BxM"),
            batch.get("source_segment_ids_BxM"),
            packed,
        )
