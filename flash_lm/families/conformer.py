"""Conformer: attention and a convolution module between two half-step feed-forwards (Gulati et al. 2020, section 2)."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.sublayer_spec import SublayerSpec, times
from flash_lm.families.transformer import SOFTMAX
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ShortConvolutions, identity_filter
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.norms import NORMS
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.dropout import drop


@section("model.conformer")
class ConformerOptions:
    """Options of the Conformer's convolution module."""

    kernel: int = key(31, "taps of a filter for each channel, causal or centred as the model is", at_least(1))


class HalfStep(Sublayer):
    """Half-step feed-forward (Macaron): ½ silu(x W_up) W_down (eq. 1)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Width config.mlp_dim."""
        self.up = Dense(config.model_dim, config.mlp_dim, config, rngs=rngs)
        self.down = Output(config.mlp_dim, config.model_dim, config, rngs=rngs)
        self.weights = 2 * config.model_dim * config.mlp_dim

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """B×L×D."""
        return 0.5 * self.down(jax.nn.silu(self.up(x_BxLxD)))

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Two products."""
        return 2 * self.weights


class ClosingHalfStep(HalfStep):
    """Second half-step feed-forward and the norm that closes the layer: norm(x + ½ feed-forward(norm(x)))."""

    owns_residual = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Width config.mlp_dim."""
        super().__init__(config, rngs=rngs)
        self.dropout = config.dropout
        self.norm, self.closing_norm = NORMS[config.norm](config), NORMS[config.norm](config)

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """The new residual stream."""
        added = drop(super().__call__(self.norm(x_BxLxD), context), self.dropout, context.dropout_key)
        return self.closing_norm(x_BxLxD + added)


class ConvolutionModule(Sublayer):
    """Convolution module: silu(norm(depthwise convolution(x W_v ⊙ σ(x W_g)))) W_o (section 2.2).

    The norm is over the channels of a token; the paper's is over the batch and time.
    """

    def __init__(self, config: ModelConfig, options: ConformerOptions, *, rngs: nnx.Rngs):
        """Width D."""
        dim = config.model_dim
        self.value, self.gate = (Dense(dim, dim, config, rngs=rngs) for _ in range(2))
        self.output = Output(dim, dim, config, rngs=rngs)
        self.convolutions = ShortConvolutions({"value": identity_filter(options.kernel, dim, config)}, config, "none")
        self.norm = NORMS[config.norm](config)
        self.weights = 3 * dim * dim

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """B×L×D."""
        return self._finish(self.convolutions(self._apply_gate(x_BxLxD), context))

    def init_state(self, batch_size: int, capacity: int) -> Mapping[str, jax.Array]:
        """The inputs of the convolution before the first token; `capacity` is not used."""
        return self.convolutions.init_state(batch_size)

    def prefill(
        self, x_BxLxD: jax.Array, context: Context, state: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Any number of tokens per sequence, including none."""
        if x_BxLxD.shape[1] == 0:
            return x_BxLxD, state
        convolved, state = self.convolutions.prefill(self._apply_gate(x_BxLxD), context, state)
        return self._finish(convolved), state

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Three products, and the taps."""
        return 2 * self.weights + self.convolutions.flops_per_token(length, causal)

    def _apply_gate(self, x_BxLxD: jax.Array) -> dict[str, jax.Array]:
        return {"value": self.value(x_BxLxD) * jax.nn.sigmoid(self.gate(x_BxLxD))}

    def _finish(self, convolved: Mapping[str, jax.Array]) -> jax.Array:
        return self.output(jax.nn.silu(self.norm(convolved["value"])))


# Two feed-forwards of 1.25 D, which with 3 D² of the convolution module have the 8 D² of the Transformer's.
_HALF: dict[str, Any] = {"keys": frozenset({"mlp_dim"}), "defaults": {"mlp_dim": times(5, 4)}}
HALF_STEP = SublayerSpec(HalfStep, **_HALF)
CONVOLUTION_MODULE = SublayerSpec(ConvolutionModule, (ConformerOptions,))
CLOSING_HALF_STEP = SublayerSpec(ClosingHalfStep, **_HALF)
ROWS = {
    "conformer": Family(
        (HALF_STEP, SOFTMAX, CONVOLUTION_MODULE, CLOSING_HALF_STEP),
        {"rotary": True},
        about="softmax attention and a depthwise convolution, between two half-step feed-forwards (Macaron)",
        paper="Gulati et al. 2020, arXiv:2005.08100",
        mixer=1,
    )
}
