"""Short depthwise convolutions of queries, keys and values (Primer, Mamba-2, Gated DeltaNet)."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.layers.context import Context
from flash_lm.layers.parameter import VECTORS
from flash_lm.ops.convolution import continue_convolution, convolve, reach

_ACTIVATIONS = {"none": lambda x: x, "silu": jax.nn.silu}


@section("model.convolution")
class ConvolutionOptions:
    """Options of short convolutions in an attention; a gated attention unit always has a silu after them."""

    activation: str = key(
        "none",
        "after model.short_convolution: none (Primer) or silu (Mamba-2, Gated DeltaNet)",
        one_of(*_ACTIVATIONS),
    )


Arrays = Mapping[str, jax.Array]


class ShortConvolutions(nnx.Module):
    """Short convolutions: a causal or centred filter for each of several arrays."""

    def __init__(self, filters: Mapping[str, nnx.Param], config: ModelConfig, activation: str):
        """Takes the filters by the names of the arrays: W×D, depthwise, or W×D×E, with the same W."""
        self.names, self.activation = tuple(filters), activation
        (self.count,) = {taps.shape[0] for taps in filters.values()}
        self.weights_of_a_tap = sum(math.prod(taps.shape[1:]) for taps in filters.values())
        self.state_dtype = jnp.dtype(config.state_dtype or config.dtype)
        for name, taps in filters.items():
            setattr(self, name, taps)

    def __call__(self, arrays: Arrays, context: Context) -> dict[str, jax.Array]:
        """The arrays, B×L×D each, convolved inside documents where they have a filter."""
        # Filters do not cross the boundaries of documents.
        assert context.segments is not None
        runs_BxL, convolved = context.segments.runs_BxL, dict(arrays)
        for name in self.names:
            convolved[name] = self._activate(convolve(arrays[name], self._taps(name), runs_BxL, causal=context.causal))
        return convolved

    def init_state(self, batch: int) -> dict[str, jax.Array]:
        """The inputs before the first token."""
        shape = lambda name: (batch, self.count - 1, self._taps(name).shape[1])
        return {name: jnp.zeros(shape(name), self.state_dtype) for name in self.names}

    def prefill(self, arrays: Arrays, context: Context, state: Arrays) -> tuple[dict[str, jax.Array], Arrays]:
        """`__call__` from any position of each sequence; and the last inputs of each array."""
        # The last inputs before padding are the state of the next call.
        assert context.lengths_B is not None
        convolved, after = dict(arrays), {}
        for name in self.names:
            x, after[name] = continue_convolution(arrays[name], self._taps(name), state[name], context.lengths_B)
            convolved[name] = self._activate(x)
        return convolved, after

    def flops_per_token(self, length: int, causal: bool) -> float:
        """The taps that read a token of the sequence."""
        return 2 * self.weights_of_a_tap * taps_inside(self.count, length, causal)

    def _taps(self, name: str) -> jax.Array:
        return getattr(self, name)[...]

    def _activate(self, x_BxLxD: jax.Array) -> jax.Array:
        return _ACTIVATIONS[self.activation](x_BxLxD)


def taps_inside(taps: int, length: int, causal: bool) -> float:
    """How many taps of a token read a token of the sequence, on average over `length` tokens."""
    # Taps that fall off the first or last tokens read nothing.
    sides = [(side, min(side, length)) for side in reach(taps, causal)]
    outside = sum(near * side - near * (near - 1) / 2 for side, near in sides)  # of the first or last tokens
    return taps - outside / length


def short_convolutions(
    widths: Mapping[str, int], config: ModelConfig, options: ConvolutionOptions | None = None
) -> ShortConvolutions | None:
    """Depthwise convolutions after these linear maps (Primer, So et al. 2021, arXiv:2109.08668).

    They are initialised as the identity, so the model starts as the one without. None without
    model.short_convolution.
    """
    if not config.short_convolution:
        return None
    filters = {name: identity_filter(config.short_convolution, width, config) for name, width in widths.items()}
    return ShortConvolutions(filters, config, options.activation if options else "none")


def identity_filter(taps: int, width: int, config: ModelConfig) -> nnx.Param:
    """A depthwise filter that is the identity, W×D."""
    center, _ = reach(taps, bool(config.causal))
    return nnx.Param(jnp.zeros((taps, width), jnp.dtype(config.param_dtype)).at[center].set(1), **VECTORS)
