"""The module that the stack repeats: residual sublayers with their norms, of one layer or of a whole pattern."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.families.encoder import is_cross, parts_of
from flash_lm.layers.context import Context
from flash_lm.layers.norms import NORMS
from flash_lm.layers.sublayer import LayerArray, State, Sublayer
from flash_lm.ops.dropout import drop


class Residual(NamedTuple):
    """A sublayer and the norm before it, which is None if the sublayer owns its residual."""

    norm: Any
    sublayer: Sublayer

    def before(self, x: jax.Array) -> jax.Array:
        """The sublayer's input, from the residual stream."""
        return x if self.sublayer.owns_residual else self.norm(x)

    def after(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The new stream, from the old one and the sublayer's output."""
        return y if self.sublayer.owns_residual else x + y


class Period(nnx.Module):
    """The sublayers of a layer, or of each layer of a pattern in turn: x + dropout(sublayer(norm(x))).

    A sublayer that owns its residual replaces this whole expression.
    """

    def __init__(self, layers: Sequence[ModelConfig], *, rngs: nnx.Rngs):
        """Builds the sublayers of each layer's family, each with its own norm."""
        self.dropout = layers[0].dropout
        parts = [(config, part) for config in layers for part in parts_of(config)]
        # Cross attention has names of its own, so that the others are named as in a model without an encoder.
        crossing, own = itertools.count(), itertools.count()
        self.names = tuple(
            f"cross_{next(crossing)}" if is_cross(part) else f"sublayer_{next(own)}" for _, part in parts
        )
        for name, (config, build) in zip(self.names, parts, strict=True):
            sublayer = build(config, rngs=rngs)
            setattr(self, name, sublayer)
            setattr(self, f"norm_{name}", None if sublayer.owns_residual else NORMS[config.norm](config))
        # Numbers of sublayers after which a layer ends.
        self.ends = tuple(itertools.accumulate(len(parts_of(config)) for config in layers))

    @property
    def sublayers(self) -> list[Sublayer]:
        """All sublayers in order."""
        return [getattr(self, name) for name in self.names]

    def __call__(self, x_BxLxD: jax.Array, context: Context, seen: Callable[[jax.Array], Any]):
        """The parallel form: B×L×D, and the results of `seen` on the output of each layer."""
        found = []
        for i, residual in enumerate(self.residuals()):
            x_BxLxD, _ = self._mixed(i, residual, x_BxLxD, context, lambda sublayer, *of: (sublayer(*of), None))
            if i + 1 in self.ends:
                found.append(seen(x_BxLxD))
        return x_BxLxD, found

    def carry(self, x_BxLxD: jax.Array, context: Context, states: tuple[State, ...]):
        """As `__call__`, for rows that continue from states: B×L×D, and the states after them."""
        after = []
        for i, (residual, state) in enumerate(zip(self.residuals(), states, strict=True)):
            mix = lambda sublayer, *of, state=state: sublayer.prefill(*of, state)
            x_BxLxD, state = self._mixed(i, residual, x_BxLxD, context, mix)
            after.append(state)
        return x_BxLxD, tuple(after)

    def _mixed(self, i: int, residual: Residual, x_BxLxD: jax.Array, context: Context, mix: Callable):
        """The stream after the i-th sublayer, of which `mix` gives the output and a state."""
        key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, i)
        own = residual.sublayer.owns_residual
        of_mix = dataclasses.replace(context, dropout_key=key) if own else context
        y_BxLxD, state = mix(residual.sublayer, residual.before(x_BxLxD), of_mix)
        y_BxLxD = y_BxLxD if own else drop(y_BxLxD, self.dropout, key)
        return constrain_residual(residual.after(x_BxLxD, y_BxLxD)), state

    def init_state(self, batch_size: int, capacity: int) -> tuple[State, ...]:
        """The sublayers' states."""
        return tuple(sublayer.init_state(batch_size, capacity) for sublayer in self.sublayers)

    def remember(self, x_BxMxD: jax.Array, lengths_B: jax.Array, states: tuple[State, ...]) -> tuple[State, ...]:
        """The sublayers' states with a memory."""
        both = zip(self.sublayers, states, strict=True)
        return tuple(sublayer.remember(x_BxMxD, lengths_B, state) for sublayer, state in both)

    def decode(self, method: str, x: jax.Array, context: Context, states: tuple[State, ...]):
        """`prefill` on B×L×D or `step` on B×D."""
        after = []
        for residual, state in zip(self.residuals(), states, strict=True):
            y, state = getattr(residual.sublayer, method)(residual.before(x), context, state)
            x, after = residual.after(x, y), [*after, state]
        return x, tuple(after)

    def settle(self, states: tuple[State, ...], positions_B: jax.Array) -> tuple[State, ...]:
        """Does the work that `step` has put off, in each sublayer."""
        both = zip(self.sublayers, states, strict=True)
        return tuple(sublayer.settle(state, positions_B) for sublayer, state in both)

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Forward model FLOPs of the sublayers."""
        return sum(sublayer.flops_per_token(length, causal) for sublayer in self.sublayers)

    def penalty(self) -> jax.Array:
        """Sum of the sublayers' penalties."""
        found = [penalty for sublayer in self.sublayers if (penalty := sublayer.penalty()) is not None]
        return sum(found, start=jnp.zeros(()))

    def measures(self) -> dict[str, jax.Array]:
        """The sublayers' measures, those of one name side by side."""
        found = [sublayer.measures() for sublayer in self.sublayers]
        names = dict.fromkeys(name for own in found for name in own)
        return {name: jnp.concatenate([own[name].ravel() for own in found if name in own]) for name in names}

    def place(self, i: int) -> tuple[int, int]:
        """The layer of sublayer i within the period, and the sublayer's index in that layer."""
        layer = bisect.bisect_right(self.ends, i)
        return layer, i - (0, *self.ends)[layer]

    def residuals(self) -> list[Residual]:
        """The sublayers in order, each with its norm."""
        return [Residual(getattr(self, f"norm_{name}"), getattr(self, name)) for name in self.names]


def stack(layers: Sequence[ModelConfig], count: int, *, rngs: nnx.Rngs) -> Period:
    """`count` periods as one module, whose arrays have them as their first dimension."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Period:
        return Period(layers, rngs=rngs)

    periods = make(rngs)
    for i, sublayer in enumerate(periods.sublayers):
        numbers_N = np.arange(count, dtype=np.int32) * len(layers) + periods.place(i)[0]
        for name, values in sublayer.of_layers(numbers_N).items():
            setattr(sublayer, name, LayerArray(jnp.asarray(values)))
    return periods


def penalty_of_all(stacked: Period) -> jax.Array | None:
    """Sum over the layers; None: no sublayer has a penalty."""
    if all(type(sublayer).penalty is Sublayer.penalty for sublayer in stacked.sublayers):
        return None
    return jnp.sum(_of_each(stacked, Period.penalty))


def measures_of_all(stacked: Period) -> dict[str, jax.Array]:
    """The mean and the maximum over the layers of each measure: {"span_mean": …, "span_max": …}."""
    if all(type(sublayer).measures is Sublayer.measures for sublayer in stacked.sublayers):
        return {}
    found = _of_each(stacked, Period.measures)
    return {f"{name}_{kind}": of(x) for name, x in found.items() for kind, of in (("mean", jnp.mean), ("max", jnp.max))}


def _of_each(stacked: Period, method: Callable[[Period], Any]) -> Any:
    """The results for each period, stacked."""
    graph, parameters = nnx.split(stacked)
    return jax.vmap(lambda own: method(nnx.merge(graph, own)))(parameters)


def constrain_residual(x_BxLxD: jax.Array) -> jax.Array:
    """Shards the batch of the residual stream over the mesh's data and fsdp axes, when there is a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x_BxLxD
    return jax.lax.with_sharding_constraint(x_BxLxD, jax.sharding.PartitionSpec(("data", "fsdp"), None, None))
