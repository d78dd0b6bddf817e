"""Short convolutions of the queries, keys and values of an attention."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.context import Context
from flash_lm.layers.parameter import VECTORS
from flash_lm.ops.convolution import continue_convolution, convolve, reach
from flash_lm.schema import key, one_of, section

_ACTIVATIONS = {"none": lambda x: x, "silu": jax.nn.silu}


@section("model.convolution")
class ConvolutionOptions:
    """Options of short convolutions in an attention; a gated attention unit has its silu there anyway."""

    activation: str = key(
        "none",
        "after model.short_convolution: none (Primer) or silu (Mamba-2, Gated DeltaNet)",
        one_of(*_ACTIVATIONS),
    )


Arrays = Mapping[str, jax.Array]


class ShortConvolutions(nnx.Module):
    """One filter a channel for each of several arrays (Primer, So et al. 2021, arXiv:2109.08668).

    At the start each filter passes its own token on and nothing else, so the model begins as the one without.
    """

    def __init__(self, widths: Mapping[str, int], config: ModelConfig, activation: str):
        """Initialises `config.short_convolution` taps for each channel of the named arrays."""
        self.names, self.activation = tuple(widths), activation
        self.count, self.channels = config.short_convolution, sum(widths.values())
        self.state_dtype = jnp.dtype(config.state_dtype or config.dtype)
        own, _ = reach(self.count, bool(config.causal))
        for name, width in widths.items():
            taps_WxD = jnp.zeros((self.count, width), jnp.dtype(config.param_dtype)).at[own].set(1)
            setattr(self, name, nnx.Param(taps_WxD, **VECTORS))

    def __call__(self, arrays: Arrays, context: Context) -> dict[str, jax.Array]:
        """B×L×D each, with those convolved that have filters; inside documents."""
        assert context.segments is not None
        runs_BxL, found = context.segments.runs_BxL, dict(arrays)
        for name in self.names:
            found[name] = self._activated(convolve(arrays[name], self._taps(name), runs_BxL, causal=context.causal))
        return found

    def init_state(self, batch: int) -> dict[str, jax.Array]:
        """The inputs before the first token."""
        shape = lambda name: (batch, self.count - 1, self._taps(name).shape[1])
        return {name: jnp.zeros(shape(name), self.state_dtype) for name in self.names}

    def prefill(self, arrays: Arrays, context: Context, state: Arrays) -> tuple[dict[str, jax.Array], Arrays]:
        """As `__call__`, from any position of each row; and the last inputs of each array."""
        assert context.lengths_B is not None
        found, after = dict(arrays), {}
        for name in self.names:
            x, after[name] = continue_convolution(arrays[name], self._taps(name), state[name], context.lengths_B)
            found[name] = self._activated(x)
        return found, after

    def flops_per_token(self, length: int, causal: bool) -> float:
        """The taps that read a token of the row."""
        sides = [(side, min(side, length)) for side in reach(self.count, causal)]
        outside = sum(near * side - near * (near - 1) / 2 for side, near in sides)  # of the first or last tokens
        return 2 * self.channels * (self.count - outside / length)

    def _taps(self, name: str) -> jax.Array:
        return getattr(self, name)[...]

    def _activated(self, x_BxLxD: jax.Array) -> jax.Array:
        return _ACTIVATIONS[self.activation](x_BxLxD)


def short_convolutions(
    widths: Mapping[str, int], config: ModelConfig, options: ConvolutionOptions | None = None
) -> ShortConvolutions | None:
    """The convolutions of these linear maps; None without model.short_convolution."""
    if not config.short_convolution:
        return None
    return ShortConvolutions(widths, config, options.activation if options else "none")
