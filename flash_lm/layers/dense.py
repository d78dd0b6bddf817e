"""The linear map and the initialisers of all parameters."""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.layers.parameter import VECTORS
from flash_lm.ops.matmul import add_bias, project

_NORMAL = jax.nn.initializers.normal(0.02)

# model.init -> initialiser of kernels, (inputs, outputs)
KERNEL_INITS = {"normal": _NORMAL, "lecun": jax.nn.initializers.lecun_normal()}

# model.init -> initialiser of embeddings, (V, D); as an unembedding, D is the fan in
EMBEDDING_INITS = {"normal": _NORMAL, "lecun": jax.nn.initializers.variance_scaling(1.0, "fan_out", "normal")}


# Values of model.biases with which a linear map has a bias: most maps, and those of multi-head attention's inputs.
MOST, QUERY_KEY_VALUE, NEVER = ("all",), ("all", "qkv"), ()


class Dense(nnx.Module):
    """x W, or x W + b with `model.biases`, in the computation's dtype."""

    def __init__(
        self, inputs: int, outputs: int, config: ModelConfig, *, rngs: nnx.Rngs, biased: Collection[str] = MOST
    ):
        """Initialises W, (inputs, outputs), as config.init says, and b at 0.

        Args:
            inputs: width of x.
            outputs: width of the result.
            config: `config.model`.
            rngs: for W.
            biased: values of `model.biases` with which it has a bias.
        """
        init, dtype = KERNEL_INITS[config.init], jnp.dtype(config.param_dtype)
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype), **VECTORS) if config.biases in biased else None
        self.grad_dtype = config.grad_dtype

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Maps the last dimension."""
        # Folded to two dimensions: XLA's CPU backend runs the kernel's gradient, a sum over B and L, many times slower
        # when it has two dimensions to sum over.
        inputs, outputs = self.kernel.shape
        y_NxM = project(x_BxLxD.reshape(-1, inputs), self.kernel[...], self.grad_dtype)
        if self.bias is not None:
            y_NxM = add_bias(y_NxM, self.bias[...])
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
