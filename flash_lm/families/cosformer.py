"""cosFormer: linear attention with ReLU features and cosine re-weighting (Qin et al. 2022)."""

import jax
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, SublayerSpec, head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.attention_core import Pairs
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.linear_core import LinearCore, LinearOptions, linear_flops
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.cosformer import cosine_features


@section("model.cosformer")
class CosformerOptions:
    """Options of cosFormer's re-weighting by distance."""

    cos_length: int = key(
        None,
        "M, tokens at which the weight cos(π distance / 2M) reaches zero, and the longest sequence; open: max_length",
        at_least(1),
    )


class CosformerCore(LinearCore):
    """Cosine re-weighting: Σ relu(q)·relu(k) cos(π (i − j) / 2M) v, normalised by its weights (see `ops.cosformer`).

    M is the same in training and in decoding, for any length. Longer sequences are refused: their weights would be
    negative, and the denominator could be zero.
    """

    longest_key = "model.cosformer.cos_length"

    def __init__(self, config: ModelConfig, options: CosformerOptions, linear: LinearOptions):
        """A core with the features of `options`."""
        super().__init__(config, linear, lambda x: x)
        self.longest = options.cos_length

    def apply_feature_map(self, pairs: Pairs, context: Context) -> tuple[jax.Array, jax.Array]:
        """B×H×L×2K each, float32."""
        q, k = (cosine_features(x, context.positions_BxL, self.longest) for x in pairs["attention"])
        return q, k

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """The state S = Σ φ(k) [v, 1]ᵀ over no tokens; `capacity` is not used."""
        return super().init_state(batch, heads, 2 * key_width, value_width, capacity)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Linear attention on twice as many features."""
        return linear_flops(length, causal, self.chunk_size, heads, 2 * key_width, value_width)


def _attention(
    config: ModelConfig,
    cosformer: CosformerOptions,
    linear: LinearOptions,
    convolution: ConvolutionOptions,
    *,
    rngs: nnx.Rngs,
) -> Sublayer:
    return MultiHeadAttention(config, CosformerCore(config, cosformer, linear), convolution, rngs=rngs)


COSINE = SublayerSpec(
    _attention,
    (CosformerOptions, LinearOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS | {"kernels"},
    defaults={"cosformer.cos_length": lambda config: config.max_length},
    problems=head_problems,
)
ROWS = {
    "cosformer": Family(
        (COSINE, MLP_SPEC),
        {"absolute_positions": "learned"},
        about="linear attention with ReLU features and cosine re-weighting, and an MLP",
        paper="Qin et al. 2022, arXiv:2202.08791",
    )
}
