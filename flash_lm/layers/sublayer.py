"""The contract of every mixer and every feed-forward, and what they share."""

from typing import Any

import jax
from flax import nnx

from flash_lm.layers.context import Context

State = Any  # a pytree of arrays with the batch in front


class LayerArray(nnx.Variable):
    """What differs from layer to layer and is not trained; in a stack, the layers in front."""


class Sublayer(nnx.Module):
    """What a layer is made of. Residual, norm and dropout are outside, unless it has them itself.

    Attributes:
        owns_residual: whether it gets the residual stream as it is, and gives what takes its place.
        state_grows: whether the decode state holds something of every token, so that its capacity bounds their number.
        longest: largest number of tokens in a row; None: any.
        undecodable: why there can be no prefill and step, a sentence; None: there can.
        settles_every: a state must be settled when a row has so many tokens, or a multiple of it; None: never.
        rotary_width: width of the queries and keys that rotary positions rotate; None: there are none.
    """

    owns_residual: bool = False
    state_grows: bool = False
    longest: int | None = None
    undecodable: str | None = None
    settles_every: int | None = None
    rotary_width: int | None = None

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """The parallel form, for training: B×L×D."""
        raise TypeError(f"{type(self).__name__} must define __call__")

    def init_state(self, batch_size: int, capacity: int) -> State:
        """The decode state before the first token.

        Args:
            batch_size: B.
            capacity: largest number of tokens; bounds states that grow, and nothing else.
        """
        del batch_size, capacity
        return ()

    def prefill(self, x_BxLxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        """Consumes context.lengths_B tokens of each row, in parallel, from wherever the row stands."""
        return self(x_BxLxD, context), state

    def step(self, x_BxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        """Consumes one token a row; the context's arrays have L = 1."""
        y_Bx1xD, state = self.prefill(x_BxD[:, None], context, state)
        return y_Bx1xD[:, 0], state

    def settle(self, state: State, positions_B: jax.Array) -> State:
        """Does what `step` puts off, between the step that made it due and the next one.

        What is seldom to be done stands apart from the step, since XLA copies what only one branch changes.

        Args:
            state: after the step.
            positions_B: tokens that each row has consumed.
        """
        del positions_B
        return state

    def of_layers(self, numbers_N: jax.Array) -> dict[str, jax.Array]:
        """What differs from layer to layer, such as a window, a decay or a dilation; each an array with N in front.

        A sublayer finds them as `LayerArray`s of these names, each layer its own, when it is called.

        Args:
            numbers_N: int32, of the layers that have this sublayer, counted from 0 through the whole model.
        """
        del numbers_N
        return {}

    def penalty(self) -> jax.Array | None:
        """A scalar of its parameters, nats a target, that training adds to the loss and logs apart; None: none."""

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Model FLOPs of the forward pass a token: 2mnk a matrix product, pairs of tokens only where visible."""
        raise TypeError(f"{type(self).__name__} must define flops_per_token")
