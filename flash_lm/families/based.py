"""Based: linear attention with second-order Taylor features of the exponential (Arora et al. 2024)."""

import jax
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import GLU_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, SublayerSpec, head_width_problems, times
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.linear_core import LinearCore, LinearOptions, linear_flops
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.taylor import taylor_features, taylor_width


@section("model.based")
class BasedOptions:
    """Options of attention with Taylor features."""

    feature_dim: int = key(
        16, "K, width of a head's queries and keys; a head has 1 + K + K (K + 1) / 2 features", at_least(1)
    )


class TaylorCore(LinearCore):
    """Linear attention with Taylor features: Σ (1 + s + s²/2) v / Σ (1 + s + s²/2), s = q·k / √K (see `ops.taylor`)."""

    def __init__(self, config: ModelConfig, linear: LinearOptions):
        """A core without parameters."""
        super().__init__(config, linear, taylor_features)

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """One pair, whose scores are divided by √K."""
        return {"attention": True}

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """The state S = Σ φ(k) [v, 1]ᵀ over no tokens; `capacity` is not used."""
        return super().init_state(batch, heads, taylor_width(key_width), value_width, capacity)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Linear attention on the features; choosing the pairs of a feature is not counted."""
        return linear_flops(length, causal, self.chunk_size, heads, taylor_width(key_width), value_width)


def _attention(
    config: ModelConfig, based: BasedOptions, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, TaylorCore(config, linear), convolution, rngs=rngs, key_width=based.feature_dim)


def _problems(config: ModelConfig) -> list[str]:
    problems, width = head_width_problems(config), config[BasedOptions].feature_dim
    if config.rotary and width % 2:
        problems.append(f"model.rotary pairs dimensions: model.based.feature_dim={width} must be even")
    return problems


TAYLOR = SublayerSpec(
    _attention,
    (BasedOptions, LinearOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS | {"kernels"},
    problems=_problems,
)
ROWS = {
    "based": Family(
        (TAYLOR, GLU_SPEC),
        # Narrow queries and keys of 16 per head leave 1.5 D² of attention's 4 D² to the GLU, where a head is 64 wide.
        {"absolute_positions": "learned", "mlp_dim": times(19, 6)},
        about="linear attention with second-order Taylor features of the exponential, narrow queries and keys, and "
        "a GLU",
        paper="Arora et al. 2024, arXiv:2402.18668",
    )
}
