"""What a sublayer must know of its tokens beside their vectors."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.core import Tracer

from flash_lm.ops.segments import Segments, find_segments, whole_row
from flash_lm.ops.sight import Sight, sight_from_start, sight_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Where the tokens of one call stand.

    Attributes:
        positions_BxL: position of each token in its document, (B or 1)×L int32.
        rotary: cosines and sines for `ops.positions.rotate`, by the width of what is rotated.
        segments: the documents of each row; None in prefill and step, where a row is one document.
        lengths_B: prefill and step: tokens that each row consumes; the rest is right padding.
        dropout_key: of all randomness of this call; None: deterministic, without dropout.
        causal: static.
        packed: static: a row may hold several documents; else it is one, and perhaps padding.
    """

    positions_BxL: jax.Array
    rotary: Mapping[int, tuple[jax.Array, jax.Array]] = dataclasses.field(default_factory=dict)
    segments: Segments | None = None
    lengths_B: jax.Array | None = None
    dropout_key: jax.Array | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    packed: bool = dataclasses.field(default=False, metadata={"static": True})

    def sight(self, window: int | None = None) -> Sight:
        """What each token sees of the others: in training those of its document, decoding those of its row up to it.

        Args:
            window: only what is fewer than so many places away; None: any.
        """
        if self.segments is not None:
            return sight_of(self.segments, causal=self.causal, window=window)
        return sight_from_start(self.positions_BxL, self.real(), window)

    def real(self) -> jax.Array:
        """In prefill and step: which tokens are consumed, and are no padding, B×L."""
        assert self.lengths_B is not None
        return jnp.arange(self.positions_BxL.shape[1])[None] < self.lengths_B[:, None]


def of_rows(
    length: int,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    *,
    causal: bool,
    packed: bool = True,
    dropout_key: jax.Array | None = None,
) -> Context:
    """The context of whole rows, for the parallel form; rotary tables are the caller's.

    Args:
        length: L.
        segment_ids: B×L, 0 = padding, each document one contiguous run; None: one document a row.
        positions: B×L, position of each token in its document; None: counted from the document's start.
        causal: whether a token sees only those before it.
        packed: False promises one document a row, and padding at its end, whatever the segment ids.
        dropout_key: None: deterministic.
    """
    packed = packed and segment_ids is not None
    segments = whole_row(length) if segment_ids is None else find_segments(segment_ids)
    if positions is None:  # of rows that are one document all the same, but for padding, where they do not matter
        positions = segments.offsets_BxL if packed else whole_row(length).offsets_BxL
    return Context(positions_BxL=positions, segments=segments, dropout_key=dropout_key, causal=causal, packed=packed)


def rows_beyond(end_B: jax.Array, limit: int | None, grows: bool) -> jax.Array:
    """Which rows would go beyond what a decode state or the positions hold: inside jit, where none can be refused.

    Args:
        end_B: tokens that each row would have.
        limit: the largest number of them; None: any.
        grows: whether it is the state that bounds them.

    Raises:
        ValueError: outside jit, a row would.
    """
    beyond_B = jnp.zeros_like(end_B, bool) if limit is None else end_B > limit
    if not isinstance(beyond_B, Tracer) and beyond_B.any():
        advice = "give init_state a larger capacity" if grows else "positions end there (model.max_length)"
        raise ValueError(
            f"row {int(beyond_B.argmax())} would reach {int(end_B.max())} tokens, over the state's capacity of "
            f"{limit}: {advice}"
        )
    return beyond_B
