"""The interface of sublayers: token mixers and feed-forwards, with their decode states."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from flash_lm.layers.context import Context

State = Any  # a pytree of arrays whose first dimension is the batch


class LayerArray(nnx.Variable):
    """A value that differs by layer and is not trained; in a stack, the first dimension is the layer."""


class Sublayer(nnx.Module):
    """A part of a layer. Residual, norm and dropout are outside, unless it owns its residual.

    The map that it ends with is an `Output`, which `model.residual_init` scales, in place of a `Dense`.

    Attributes:
        owns_residual: whether its input is the residual stream itself, and its output replaces the stream.
        state_grows: whether the decode state grows with the number of tokens, which its capacity then bounds.
        longest: largest number of tokens in a sequence; None: any.
        longest_key: the key that sets `longest`.
        undecodable: a sentence on why prefill and step are not supported; None: they are.
        uncarried: a sentence on why a state cannot be carried from batch to batch in training; None: it can.
        flush_every: `flush` must be called when the length of a sequence reaches a multiple of this; None: never.
        rotary_width: width of the queries and keys that rotary positions rotate; None: no rotary positions.
    """

    owns_residual: bool = False
    state_grows: bool = False
    longest: int | None = None
    longest_key: str = "model.max_length"
    undecodable: str | None = None
    uncarried: str | None = None
    flush_every: int | None = None
    rotary_width: int | None = None

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """The parallel form, for training: B×L×D."""
        raise TypeError(f"{type(self).__name__} must define __call__")

    def init_state(self, batch_size: int, capacity: int) -> State:
        """The decode state before the first token.

        Args:
            batch_size: B.
            capacity: largest number of tokens, for states that grow; others ignore it.
        """
        del batch_size, capacity
        return ()

    def cache_memory(self, x_BxMxD: jax.Array, lengths_B: jax.Array, state: State) -> State:
        """The state with a memory to attend to, B×M×D, of which the first `lengths_B` tokens per sequence are real."""
        del x_BxMxD, lengths_B
        return state

    def prefill(self, x_BxLxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        """Consumes context.lengths_B tokens per sequence in parallel, starting at any position."""
        return self(x_BxLxD, context), state

    def step(self, x_BxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        """Recurrent form: consumes one token per sequence; the arrays of the context have L = 1."""
        y_Bx1xD, state = self.prefill(x_BxD[:, None], context, state)
        return y_Bx1xD[:, 0], state

    def flush(self, state: State, positions_B: jax.Array) -> State:
        """Folds finished chunks into the running sum; the decode loop calls it at multiples of `flush_every`.

        Rare work is separate from the step, because XLA copies arrays that only one branch changes.

        Args:
            state: state after the step.
            positions_B: number of tokens consumed per sequence.
        """
        del positions_B
        return state

    def layer_arrays(self, numbers_N: np.ndarray) -> dict[str, Any]:
        """Values that differ by layer, such as a window, a decay or a dilation; each is an array with N in front.

        When a sublayer is called, it has the values of its layer as `LayerArray`s of these names.

        Args:
            numbers_N: int32, indices of the layers with this sublayer, counted from 0 through the model.
        """
        del numbers_N
        return {}

    def penalty(self) -> jax.Array | None:
        """A scalar from its parameters, nats per target, which training adds to the loss and logs; None: none."""

    def measures(self) -> dict[str, jax.Array]:
        """Arrays from its parameters by name, whose mean and maximum over all layers training logs."""
        return {}

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Model FLOPs of the forward pass per token: 2mnk per matrix product, pairs of tokens only where visible."""
        raise TypeError(f"{type(self).__name__} must define flops_per_token")
