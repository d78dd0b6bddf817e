"""Attention whose heads learn how far back they look ("Adaptive Attention Span in Transformers", section 2.2)."""

import jax
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.span_core import SpanCore, SpanOptions


class AdaptiveSpanAttention(MultiHeadAttention):
    """Multi-head attention, a span a head, and a price on spans that makes them no longer than they are worth."""

    core: SpanCore

    def __init__(self, config: ModelConfig, options: SpanOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs):
        """H heads of width D / H."""
        super().__init__(config, SpanCore(config, options), convolution, rngs=rngs)

    def penalty(self) -> jax.Array:
        """λ times the mean span."""
        return self.core.penalty()

    def measures(self) -> dict[str, jax.Array]:
        """The spans, places."""
        return {"span": self.core.spans()}
