"""Feed-forward sublayers: MLP and gated linear unit (GLU)."""

import jax
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.layers.context import Context
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.activations import gated, gelu


class MLP(Sublayer):
    """MLP: gelu(x W_up) W_down ("Attention Is All You Need", eq. 2, with GELU)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Width config.mlp_dim."""
        self.up = Dense(config.model_dim, config.mlp_dim, config, rngs=rngs)
        self.down = Output(config.mlp_dim, config.model_dim, config, rngs=rngs)
        self.weights = 2 * config.model_dim * config.mlp_dim

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """B×L×D."""
        return self.down(gelu(self.up(x_BxLxD)))

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Two products."""
        return 2 * self.weights


class GLU(Sublayer):
    """SwiGLU: (silu(x W_gate) ⊙ x W_up) W_down ("GLU Variants Improve Transformer", Shazeer 2020, eq. 6)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Width config.mlp_dim."""
        self.gate = Dense(config.model_dim, config.mlp_dim, config, rngs=rngs)
        self.up = Dense(config.model_dim, config.mlp_dim, config, rngs=rngs)
        self.down = Output(config.mlp_dim, config.model_dim, config, rngs=rngs)
        self.weights = 3 * config.model_dim * config.mlp_dim

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """B×L×D."""
        return self.down(gated(self.gate(x_BxLxD), self.up(x_BxLxD)))

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Three products."""
        return 2 * self.weights
