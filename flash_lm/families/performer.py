"""Performer: softmax attention approximated by positive random features (FAVOR+, Choromanski et al. 2020)."""

import math

import jax
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
from flash_lm.layers.linear_core import LinearOptions, linear_flops
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.favor import (
    FeatureSums,
    favor,
    log_features,
    no_features,
    orthogonal_frequencies,
    prefill_favor,
)

_REDRAW = 0x0FEA  # keeps the features' random numbers separate from those of dropout

_REDRAWN = "model.favor.redraw=True draws new features for each batch, which sums of the batch before do not have"


@section("model.favor")
class FavorOptions:
    """Options of FAVOR+."""

    features: int = key(None, "random features per head; open: K ln K of the head's width K", at_least(1))
    redraw: bool = key(False, "new features for each microbatch of training; false: always the same")


class Frequencies(nnx.Variable):
    """Sampled once and never trained."""


def _default_features(config: ModelConfig) -> int:
    """K ln K, as the error of the estimate requires (Performer, section 2.4), rounded up to a multiple of 8."""
    width = max(config.head_width, 2)
    return math.ceil(width * math.log(width) / 8) * 8


class FavorCore(PlainCore):
    """FAVOR+: φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k) with positive orthogonal random features φ (see `ops.favor`)."""

    def __init__(self, config: ModelConfig, options: FavorOptions, linear: LinearOptions, *, rngs: nnx.Rngs):
        """Samples the features, the same for all heads of the layer."""
        self.width = config.head_width
        self.features, self.redraw = options.features, options.redraw
        self.uncarried = _REDRAWN if options.redraw else None
        # The largest power of two that is not above the chunk size.
        self.block_size = 1 << (linear.chunk_size.bit_length() - 1)
        self.frequencies = Frequencies(orthogonal_frequencies(rngs.params(), self.features, self.width))

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        assert context.segments is not None
        frequencies_FxK = self.frequencies[...]
        # Features are redrawn from the key of the microbatch; without a key, as in evaluation, they stay.
        if self.redraw and context.dropout_key is not None:
            key = jax.random.fold_in(context.dropout_key, _REDRAW)
            frequencies_FxK = orthogonal_frequencies(key, self.features, self.width)
        return favor(
            *_compute_features(pairs, frequencies_FxK),
            v,
            context.segments,
            block_size=self.block_size,
            causal=context.causal,
            packed=context.packed,
        )

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """One pair, whose scores are divided by √K."""
        return {"attention": True}

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> FeatureSums:
        """The state over no tokens; `capacity` is not used."""
        return no_features(batch, heads, self.features, value_width)

    def prefill(
        self, pairs: Pairs, v: jax.Array, context: Context, state: FeatureSums
    ) -> tuple[jax.Array, FeatureSums]:
        """Chunkwise form from any position: the state needs no chunk grid."""
        # Decoding always has the same features.
        features = _compute_features(pairs, self.frequencies[...])
        return prefill_favor(*features, v, state, context.real(), block_size=self.block_size)

    step = prefill

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """The logarithms of the features, and linear attention on the features."""
        logs = 2 * heads * 2 * self.features * key_width
        return logs + linear_flops(length, causal, self.block_size, heads, self.features, value_width)


def _compute_features(pairs: Pairs, frequencies_FxK: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = pairs["attention"]
    return log_features(q, frequencies_FxK), log_features(k, frequencies_FxK)


def _attention(
    config: ModelConfig, favor: FavorOptions, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, FavorCore(config, favor, linear, rngs=rngs), convolution, rngs=rngs)


FAVOR = SublayerSpec(
    _attention,
    (FavorOptions, LinearOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS,
    defaults={"favor.features": _default_features},
    problems=head_problems,
)
ROWS = {
    "performer": Family(
        (FAVOR, MLP_SPEC),
        {"absolute_positions": "learned"},
        about="softmax attention approximated by positive random features (FAVOR+), and an MLP",
        paper="Choromanski et al. 2020, arXiv:2009.14794",
    )
}
