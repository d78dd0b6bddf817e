"""Adaptive attention span: softmax attention with a learned span per head ("Adaptive Attention Span", section 2.2)."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, SublayerSpec, head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.attention_core import Pairs, PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.parameter import VECTORS
from flash_lm.ops.adaptive_span import log_mask, reach
from flash_lm.ops.banded_softmax import SoftmaxPart, banded_softmax, softmax_of_scores
from flash_lm.ops.kv_cache import Ring, empty_ring, positions_in, roll_ring, unroll_ring, unrolled_key_span, write_token
from flash_lm.ops.matmul import matmul
from flash_lm.ops.visibility import KeySpan


@section("model.span")
class SpanOptions:
    """Options of the adaptive attention span."""

    limit: int = key(1024, "largest span in tokens, including the query", at_least(1))
    ramp: int = key(32, "R, tokens beyond the span over which weights fall to zero", at_least(1))
    penalty: float = key(2e-6, "λ: a layer adds λ times the mean span of its heads to the loss, nats", at_least(0))
    init: float = key(0.0, "z of each head at the start, tokens", at_least(0))


class SpanCore(PlainCore):
    """softmax(q kᵀ / √K + log m_z) v with a learned span z per head (adaptive attention span).

    The blocks of keys that are visited follow from the largest span of the layer, so shorter spans take less time,
    without compiling again. The decode state has room for the longest span that is possible.
    """

    def __init__(self, config: ModelConfig, options: SpanOptions):
        """All spans start equal."""
        self.limit, self.ramp, self.rate = options.limit, options.ramp, options.penalty
        self.state_dtype = jnp.dtype(config.state_dtype)
        # A share of the limit, so that the optimizer's steps suit it; in bounds after each step, and not by a clip in
        # the forward pass, which would have no derivative outside of them.
        share_H = jnp.full(config.num_heads, options.init / options.limit, jnp.dtype(config.param_dtype))
        self.share = nnx.Param(share_H, project=_clip_span, **VECTORS)

    @property
    def pair_scaling(self) -> Mapping[str, bool]:
        """One pair, whose scores are divided by √K."""
        return {"span": True}

    def spans(self) -> jax.Array:
        """The span z of each head in tokens, H float32."""
        return self.limit * self.share[...].astype(jnp.float32)

    def penalty(self) -> jax.Array:
        """The span loss of a layer: λ times the mean span."""
        return self.rate * self.spans().mean()

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        q, k = pairs["span"]
        return self._attend(q, k, v, context.key_span(self._window())).out_BxHxLxE

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> Ring:
        """An empty ring of the last tokens; `capacity` is not used."""
        return empty_ring(batch, heads, self.limit, key_width, value_width, self.state_dtype)

    def prefill(self, pairs: Pairs, v: jax.Array, context: Context, state: Ring) -> tuple[jax.Array, Ring]:
        """The new tokens attend to those in the ring and to each other."""
        assert context.lengths_B is not None
        q, k = pairs["span"]
        # Parallel form over the ring followed by the new tokens, with the spans as a sliding window.
        start_B = context.positions_BxL[:, 0]
        cache = unroll_ring(state, k, v, start_B)
        key_span = unrolled_key_span(self.limit, start_B, context.real(), self._window())
        out = self._attend(q, cache.key_BxHxRxK, cache.value_BxHxRxE, key_span).out_BxHxLxE
        return out.astype(v.dtype), roll_ring(cache, self.limit, start_B, context.lengths_B)

    def step(self, pairs: Pairs, v: jax.Array, context: Context, state: Ring) -> tuple[jax.Array, Ring]:
        """Writes the new token to the ring in place, and attends to all of it."""
        q, k = pairs["span"]
        position_B = context.positions_BxL[:, 0]
        ring = write_token(state, k, v, position_B, context.real()[:, 0])
        slot_position_BxR = positions_in(ring, position_B)
        bias_HxBxR = log_mask(self.spans(), slot_position_BxR - position_B[:, None], self.ramp)
        scores = matmul(q.astype(ring.key_BxHxRxK.dtype), ring.key_BxHxRxK, transpose_b=True) / math.sqrt(q.shape[-1])
        # The soft mask m_z is a bias of the scores; an empty slot has a negative position.
        scores += jnp.swapaxes(bias_HxBxR, 0, 1)[:, :, None]
        out = softmax_of_scores(scores, (slot_position_BxR >= 0)[:, None, None], ring.value_BxHxRxE).out_BxHxLxE
        return out.astype(v.dtype), ring

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Scores and weighted values of the pairs that the largest spans reach."""
        # Pairs of a causal sequence whose tokens see at most the last `limit` tokens.
        back = min(self.limit, length)
        pairs = back * length - back * (back - 1) / 2
        return 2 * heads * (pairs if causal else 2 * pairs - length) / length * (key_width + value_width)

    def _window(self) -> jax.Array:
        return jnp.minimum(reach(self.spans(), self.ramp), self.limit)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, key_span: KeySpan) -> SoftmaxPart:
        bias = lambda distance: log_mask(self.spans(), distance, self.ramp)
        scale = 1 / math.sqrt(q.shape[-1])
        return banded_softmax(q.astype(k.dtype), k, v, key_span, scale=scale, window=self.ramp, bias=bias)


def _clip_span(share_H: jax.Array) -> jax.Array:
    return jnp.clip(share_H, 0, 1)


class AdaptiveSpanAttention(MultiHeadAttention):
    """Multi-head attention with a span per head, and an L1 penalty on the spans."""

    core: SpanCore

    def __init__(self, config: ModelConfig, options: SpanOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs):
        """H heads of width K."""
        super().__init__(config, SpanCore(config, options), convolution, rngs=rngs)

    def penalty(self) -> jax.Array:
        """The span loss of a layer: λ times the mean span."""
        return self.core.penalty()

    def measures(self) -> dict[str, jax.Array]:
        """The spans in tokens."""
        return {"span": self.core.spans()}


def _problems(config: ModelConfig) -> list[str]:
    problems, span = head_problems(config), config[SpanOptions]
    if span.init > span.limit:
        problems.append(f"model.span.init={span.init} must be at most model.span.limit={span.limit}")
    return problems


SPAN = SublayerSpec(AdaptiveSpanAttention, (SpanOptions, ConvolutionOptions), MULTI_HEAD_KEYS, problems=_problems)
ROWS = {
    "adaptive_span": Family(
        (SPAN, MLP_SPEC),
        {"rotary": True},
        about="softmax attention with a learned attention span per head, and an MLP",
        paper="Sukhbaatar et al. 2019, arXiv:1905.07799",
    )
}
