"""The Transformer; Transformer+ with rotary positions (RoPE), Transformer++ also with a gated feed-forward (GLU)."""

from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import GLU_SPEC, MLP_SPEC
from flash_lm.families.sublayer_spec import EVERYTHING, MULTI_HEAD_KEYS, SublayerSpec, grouped_head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.quadratic_core import QuadraticCore, QuadraticOptions
from flash_lm.layers.sublayer import Sublayer


def _attention(
    config: ModelConfig, quadratic: QuadraticOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    core = QuadraticCore(config, quadratic)
    return MultiHeadAttention(config, core, convolution, rngs=rngs, key_heads=config.num_kv_heads)


SOFTMAX = SublayerSpec(
    _attention,
    (QuadraticOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS | {"num_kv_heads"},
    defaults={"num_kv_heads": lambda config: config.num_heads},
    problems=grouped_head_problems,
    serves=EVERYTHING,
)
ROWS = {
    "transformer": Family(
        (SOFTMAX, MLP_SPEC),
        {"absolute_positions": "learned"},
        about="softmax attention and an MLP, learned positions",
        paper="Vaswani et al. 2017, arXiv:1706.03762",
    ),
    "transformer_plus": Family(
        (SOFTMAX, MLP_SPEC),
        {"rotary": True},
        about="the Transformer with rotary positions (RoPE)",
        paper="Su et al. 2021, arXiv:2104.09864",
    ),
    "transformer_plus_plus": Family(
        (SOFTMAX, GLU_SPEC),
        {"rotary": True},
        about="softmax attention and a gated feed-forward (GLU), rotary positions",
        paper="Shazeer 2020, arXiv:2002.05202",
    ),
}
