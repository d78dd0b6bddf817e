"""The linear map and the initialisers of all parameters."""

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.ops.matmul import project

_NORMAL = jax.nn.initializers.normal(0.02)

# model.init -> initialiser of kernels, (inputs, outputs)
KERNEL_INITS = {"normal": _NORMAL, "lecun": jax.nn.initializers.lecun_normal()}

# model.init -> initialiser of embeddings, (V, D); as an unembedding, D is the fan in
EMBEDDING_INITS = {"normal": _NORMAL, "lecun": jax.nn.initializers.variance_scaling(1.0, "fan_out", "normal")}


class Dense(nnx.Module):
    """x W without bias, in the computation's dtype."""

    def __init__(self, inputs: int, outputs: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """Initialises W, (inputs, outputs), as config.init says."""
        init = KERNEL_INITS[config.init]
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), jnp.dtype(config.param_dtype)))
        self.grad_dtype = config.grad_dtype

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Maps the last dimension."""
        # Folded to two dimensions: XLA's CPU backend runs the kernel's gradient, a sum over B and L, many times slower
        # when it has two dimensions to sum over.
        inputs, outputs = self.kernel.shape
        y_NxM = project(x_BxLxD.reshape(-1, inputs), self.kernel[...], self.grad_dtype)
        return y_NxM.reshape(*x_BxLxD.shape[:-1], outputs)


class Output(Dense):
    """The output projection of a sublayer, into the residual stream."""

    def __init__(self, inputs: int, outputs: int, config: ModelConfig, *, rngs: nnx.Rngs):
        """With `residual_init=depth` W starts 1/√N times as large (GPT-2, Radford et al. 2019, section 2.3).

        N is 2 L, as if each layer had two sublayers.
        """
        super().__init__(inputs, outputs, config, rngs=rngs)
        if config.residual_init == "depth":
            self.kernel[...] *= (2 * config.num_layers) ** -0.5
