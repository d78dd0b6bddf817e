"""Nyströmformer: softmax attention approximated with landmarks, and a convolution of the values (Xiong et al. 2021)."""

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, WHOLE_ROWS, SublayerSpec, head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.attention_core import Pairs, WholeRowCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.convolution import convolve_heads, reach
from flash_lm.ops.nystrom import nystrom_attention

# The initialisation of PyTorch's convolutions, which the authors use: uniform up to ±1/√taps.
_TAPS_INIT = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


@section("model.nystrom")
class NystromOptions:
    """Options of Nyström attention."""

    landmarks: int = key(64, "m, landmarks: segment means of the queries and keys", at_least(1))
    kernel_size: int = key(33, "taps of the convolution of the values; 0: none", at_least(0))
    pinv_steps: int = key(6, "iterations towards the pseudo-inverse", at_least(1))


class NystromCore(WholeRowCore):
    """Nyström attention: softmax(q k̃ᵀ/√K) Z softmax(q̃ kᵀ/√K) v (see `ops.nystrom`), plus a filter of v per head."""

    def __init__(self, config: ModelConfig, options: NystromOptions, *, rngs: nnx.Rngs):
        """Initialises the filters."""
        self.landmarks, self.steps, self.kernel_size = options.landmarks, options.pinv_steps, options.kernel_size
        shape, dtype = (options.kernel_size, config.num_heads), jnp.dtype(config.param_dtype)
        self.taps = nnx.Param(_TAPS_INIT(rngs.params(), shape, dtype), **VECTORS) if options.kernel_size else None

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        real_BxL = self.real(context)
        out = nystrom_attention(*pairs["attention"], v, real_BxL, landmarks=self.landmarks, steps=self.steps)
        return out if self.taps is None else out + _filter_values(v, self.taps[...], real_BxL)

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """One pair, whose scores are divided by √K."""
        return {"attention": True}

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Scores and values of tokens and landmarks, the means, and the pseudo-inverse, once per sequence.

        A sequence of m tokens or fewer has exact softmax attention.
        """
        m = self.landmarks
        sides = [(side, min(side, length)) for side in reach(self.kernel_size, False)] if self.kernel_size else []
        outside = sum(near * side - near * (near - 1) / 2 for side, near in sides)
        taps = (self.kernel_size - outside / length) * value_width
        if length <= m:
            return 2 * heads * (length * (key_width + value_width) + taps)
        # F and B with their values, and the landmarks; A and the pseudo-inverse are shared by all tokens.
        of_tokens = 2 * m * (key_width + value_width) + 2 * m * key_width
        of_landmarks = m * m * (key_width + value_width) + self.steps * 4 * m**3
        return 2 * heads * (of_tokens + taps + of_landmarks / length)


@jax.checkpoint
def _filter_values(v_BxHxLxE: jax.Array, taps_WxH: jax.Array, real_BxL: jax.Array) -> jax.Array:
    """Each head by its filter; the backward pass keeps v alone."""
    return convolve_heads(jnp.where(real_BxL[:, None, :, None], v_BxHxLxE, 0), taps_WxH)


def _attention(
    config: ModelConfig, nystrom: NystromOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, NystromCore(config, nystrom, rngs=rngs), convolution, rngs=rngs)


NYSTROM = SublayerSpec(
    _attention,
    (NystromOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS,
    problems=head_problems,
    serves=WHOLE_ROWS,
)
ROWS = {
    "nystromformer": Family(
        (NYSTROM, MLP_SPEC),
        {"absolute_positions": "learned"},
        about="softmax attention approximated with landmarks (Nyström), and an MLP; bidirectional, one document per "
        "sequence",
        paper="Xiong et al. 2021, arXiv:2102.03902",
    )
}
