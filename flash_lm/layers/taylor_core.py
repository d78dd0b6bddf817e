"""Attention core of Based: linear attention whose features are those of a Taylor polynomial of the softmax."""

import jax

from flash_lm.config import ModelConfig
from flash_lm.layers.linear_core import LinearCore, LinearOptions, linear_flops
from flash_lm.ops.taylor import taylor_features, taylor_width
from flash_lm.schema import at_least, key, section


@section("model.based")
class BasedOptions:
    """Options of attention by a Taylor polynomial."""

    feature_dim: int = key(
        16, "K, width of a head's queries and keys; it has 1 + K + K (K + 1) / 2 features", at_least(1)
    )


class TaylorCore(LinearCore):
    """Σ (1 + s + s²/2) v over the same sum without v, with s = q·k / √K (see `ops.taylor`)."""

    def __init__(self, config: ModelConfig, linear: LinearOptions):
        """A core without parameters."""
        super().__init__(config, linear, taylor_features)

    @property
    def scaled(self) -> dict[str, bool]:
        """One pair, whose scores are divided by √K."""
        return {"attention": True}

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """Σ φ(k) [v, 1]ᵀ of no tokens; `capacity` is not used."""
        return super().init_state(batch, heads, taylor_width(key_width), value_width, capacity)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Linear attention on the features; choosing the pairs of a feature is not counted."""
        return linear_flops(length, causal, self.chunk_size, heads, taylor_width(key_width), value_width)
