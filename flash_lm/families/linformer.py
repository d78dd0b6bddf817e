"""Linformer: softmax attention with keys and values projected along the length (Wang et al. 2020)."""

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, WHOLE_ROWS, SublayerSpec, head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.attention_core import Pairs, WholeRowCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.linformer import attend_to_slots


@section("model.linformer")
class LinformerOptions:
    """Options of the projections along the length."""

    slots: int = key(128, "r, keys and values that a document is projected to", at_least(1))
    share_slots: str = key("none", "none, or kv: one projection for keys and values (E = F)", one_of("none", "kv"))


class LinformerCore(WholeRowCore):
    """Linformer: softmax(q (E k)ᵀ / √K) F v (see `ops.linformer`); all heads share E and F."""

    def __init__(self, config: ModelConfig, options: LinformerOptions, *, rngs: nnx.Rngs):
        """Initialises E and F for `config.max_length` positions."""
        self.longest = config.max_length
        shape, dtype = (config.max_length, options.slots), jnp.dtype(config.param_dtype)
        # Sums of n independent keys, weighted so, have the variance of one key: scores begin as those of a softmax
        # over tokens do. The paper does not say what its projections start from.
        init = jax.nn.initializers.normal(config.max_length**-0.5)
        draw = lambda: nnx.Param(init(rngs.params(), shape, dtype), positions=True)
        self.key_slots = draw()
        self.value_slots = draw() if options.share_slots == "none" else None

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        # Shorter sequences use the first rows of the projections.
        real_BxL, length = self.real(context), v.shape[2]
        key_slots = self.key_slots[...][:length]
        value_slots = key_slots if self.value_slots is None else self.value_slots[...][:length]
        return attend_to_slots(*pairs["attention"], v, key_slots, value_slots, real_BxL)

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """One pair, whose scores are divided by √K."""
        return {"attention": True}

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Per token: the projections of its key and value, and attention to r projected keys."""
        slots = self.key_slots.shape[-1]
        return 2 * heads * 2 * slots * (key_width + value_width)


def _attention(
    config: ModelConfig, linformer: LinformerOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, LinformerCore(config, linformer, rngs=rngs), convolution, rngs=rngs)


SLOTS = SublayerSpec(
    _attention,
    (LinformerOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS,
    problems=head_problems,
    serves=WHOLE_ROWS,
)
ROWS = {
    "linformer": Family(
        (SLOTS, MLP_SPEC),
        {"absolute_positions": "learned"},
        about="softmax attention with keys and values projected along the length, and an MLP; bidirectional, one "
        "document per sequence",
        paper="Wang et al. 2020, arXiv:2006.04768",
    )
}
