"""The interface of attention cores: token mixing between the input and output projections of a sublayer."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
from flax import nnx

from flash_lm.errors import InputError
from flash_lm.layers.context import Context
from flash_lm.layers.sublayer import State


class Pair(NamedTuple):
    """Queries and keys, B×H×L×K each.

    If the sublayer has fewer heads of keys than of queries, its core must support that.
    """

    q_BxHxLxK: jax.Array
    k_BxHxLxK: jax.Array


Pairs = Mapping[str, Pair]

Mixed = TypeVar("Mixed", contravariant=True)


class Core(Protocol[Mixed]):
    """Token mixing: weighted sums of values, with weights from queries and keys, or from keys only.

    A core is linear in the values; `weights` of a sublayer relies on this.

    Attributes:
        state_grows: whether the decode state grows with the number of tokens.
        longest: largest number of tokens in a sequence; None: any.
        longest_key: the key that sets `longest`.
        undecodable: a sentence on why prefill and step are not supported; None: they are.
        uncarried, flush_every: as for a `Sublayer`.
    """

    @property
    def state_grows(self) -> bool: ...  # noqa: D102
    @property
    def longest(self) -> int | None: ...  # noqa: D102
    @property
    def longest_key(self) -> str: ...  # noqa: D102
    @property
    def undecodable(self) -> str | None: ...  # noqa: D102
    @property
    def uncarried(self) -> str | None: ...  # noqa: D102
    @property
    def flush_every(self) -> int | None: ...  # noqa: D102

    def __call__(self, by: Mixed, v_BxHxLxE: jax.Array, context: Context, /) -> jax.Array:
        """B×H×L×E."""
        ...

    def terms(self, by: Mixed, v_BxHxLxE: jax.Array, context: Context, /) -> dict[str, jax.Array]:
        """The terms of the output by name; most cores have only "attention"."""
        ...

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> State:
        """The decode state before the first token; `capacity` bounds those that grow."""
        ...

    def prefill(self, by: Mixed, v_BxHxLxE: jax.Array, context: Context, state: Any, /) -> tuple[jax.Array, State]:
        """Consumes context.lengths_B tokens per sequence in parallel, from any position."""
        ...

    def step(self, by: Mixed, v_BxHxLxE: jax.Array, context: Context, state: Any, /) -> tuple[jax.Array, State]:
        """Recurrent form: consumes one token per sequence, L = 1."""
        ...

    def flush(self, state: Any, positions_B: jax.Array, /) -> State:
        """Folds finished chunks into the state; see `Sublayer.flush`."""
        ...

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Model FLOPs of the forward pass per token."""
        ...


class CoreOfPairs(Core[Pairs], Protocol):
    """A core whose weights come from pairs of queries and keys.

    Attributes:
        scaled: the names of the pairs that it takes, in the order of their parameters, and whether their scores are
            divided by √K.
    """

    @property
    def pair_scaling(self) -> Mapping[str, bool]: ...  # noqa: D102


class PlainCore(nnx.Module):
    """Defaults of most cores: one term, and a state of constant size that never needs `flush`."""

    state_grows: Any = False
    longest: Any = None
    longest_key: Any = "model.max_length"
    undecodable: Any = None
    uncarried: Any = None
    flush_every: Any = None

    def terms(self, by: Any, v_BxHxLxE: jax.Array, context: Context) -> dict[str, jax.Array]:
        """The output as one term."""
        return {"attention": self(by, v_BxHxLxE, context)}

    def flush(self, state: Any, positions_B: jax.Array) -> Any:
        """Nothing to do."""
        del positions_B
        return state


class UndecodableCore(PlainCore):
    """A core without prefill and step: its outputs depend on later tokens, or nobody has written them yet."""

    @property
    def undecodable(self) -> str | None:  # type: ignore[override]
        """The sentence for both kinds of core."""
        return f"{type(self).__name__} defines no prefill and no step: a model with it is trained and scored only"

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> Any:
        """Raises an InputError."""
        raise InputError(self.undecodable)

    def prefill(self, by: Any, v_BxHxLxE: jax.Array, context: Context, state: Any) -> tuple[jax.Array, Any]:
        """Raises an InputError."""
        raise InputError(self.undecodable)

    step = prefill


class WholeRowCore(UndecodableCore):
    """A core whose outputs all depend on the full sequence: bidirectional, one document per sequence."""

    undecodable: Any = "this attention mixes all tokens of a sequence at once: prefill and step are not supported"

    def real(self, context: Context) -> jax.Array:
        """Which tokens are not padding, (B or 1)×L; padding is at the end.

        Raises:
            InputError: the context is causal, or its sequences may be packed.
        """
        if context.causal or context.packed or context.segments is None:
            raise InputError(
                f"{type(self).__name__} mixes full sequences: it needs a bidirectional context with one document per "
                "sequence, so set causal=False and packed=False"
            )
        return context.segments.runs_BxL > 0
