"""Attention whose heads learn how far back they look ("Adaptive Attention Span in Transformers", section 2.2)."""

import jax

from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.span_core import SpanCore


class AdaptiveSpanAttention(MultiHeadAttention):
    """Multi-head attention, a span a head, and a price on spans that makes them no longer than they are worth."""

    core: SpanCore

    def penalty(self) -> jax.Array:
        """λ times the mean span."""
        return self.core.penalty()

    def measures(self) -> dict[str, jax.Array]:
        """The spans, places."""
        return {"span": self.core.spans()}
