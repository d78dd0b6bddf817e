"""What a sublayer must know of its tokens beside their vectors."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from flash_lm.ops.segments import Segments
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
