"""Linear Transformer: linear attention with the feature map elu + 1 (Katharopoulos et al. 2020)."""

from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import EVERYTHING, MULTI_HEAD_KEYS, SublayerSpec, head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.linear_core import LinearCore, LinearOptions
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.linear_attention import elu_plus_one


def _attention(
    config: ModelConfig, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, LinearCore(config, linear, elu_plus_one), convolution, rngs=rngs)


LINEAR = SublayerSpec(
    _attention,
    (LinearOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS | {"kernels"},
    problems=head_problems,
    serves=EVERYTHING,
)
ROWS = {
    "linear_transformer": Family(
        (LINEAR, MLP_SPEC),
        {"absolute_positions": "learned"},
        about="linear attention with the feature map elu + 1, and an MLP",
        paper="Katharopoulos et al. 2020, arXiv:2006.16236",
    )
}
