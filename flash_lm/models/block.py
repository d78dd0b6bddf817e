"""`Block`: the repeating unit of the layer scan: one layer, or one repetition of `model.pattern`."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.families.encoder import is_cross, sublayer_specs
from flash_lm.layers.context import Context
from flash_lm.layers.norms import NORMS
from flash_lm.layers.sublayer import LayerArray, State, Sublayer
from flash_lm.ops.dropout import drop


class Residual(NamedTuple):
    """A sublayer and the norm before it; the norm is None if the sublayer owns its residual."""

    norm: Any
    sublayer: Sublayer

    def before(self, x: jax.Array) -> jax.Array:
        """The sublayer's input, from the residual stream."""
        return x if self.sublayer.owns_residual else self.norm(x)

    def after(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The new stream, from the old one and the sublayer's output."""
        return y if self.sublayer.owns_residual else x + y


class Block(nnx.Module):
    """The sublayers of one layer, or of each layer of a pattern in turn: x + dropout(sublayer(norm(x))).

    A sublayer that owns its residual replaces this whole expression.
    """

    def __init__(self, layers: Sequence[ModelConfig], *, rngs: nnx.Rngs):
        """Builds the sublayers of each layer's family, each with its own norm."""
        # The specs of all layers of the block in order, each with the config of its layer.
        self.dropout = layers[0].dropout
        specs = [(config, spec) for config in layers for spec in sublayer_specs(config)]
        # Cross attention has separate names, so that the others are named as in a model without an encoder.
        cross_numbers, numbers = itertools.count(), itertools.count()
        self.names = tuple(
            f"cross_{next(cross_numbers)}" if is_cross(spec) else f"sublayer_{next(numbers)}" for _, spec in specs
        )
        for name, (config, build) in zip(self.names, specs, strict=True):
            sublayer = build(config, rngs=rngs)
            setattr(self, name, sublayer)
            setattr(self, f"norm_{name}", None if sublayer.owns_residual else NORMS[config.norm](config))
        # Numbers of sublayers after which a layer ends.
        self.ends = tuple(itertools.accumulate(len(sublayer_specs(config)) for config in layers))

    @property
    def sublayers(self) -> list[Sublayer]:
        """All sublayers in order."""
        return [getattr(self, name) for name in self.names]

    def residuals(self) -> list[Residual]:
        """The sublayers in order, each with its norm."""
        return [Residual(getattr(self, f"norm_{name}"), getattr(self, name)) for name in self.names]

    def layer_and_index(self, i: int) -> tuple[int, int]:
        """The layer of sublayer i within the block, and the sublayer's index in that layer."""
        layer = bisect.bisect_right(self.ends, i)
        return layer, i - (0, *self.ends)[layer]

    def __call__(self, x_BxLxD: jax.Array, context: Context, measure: Callable[[jax.Array], Any]):
        """The parallel form: B×L×D, and the results of `measure` on the output of each layer."""
        # Pre-norm residuals; `measure` sees the stream after the last sublayer of each layer.
        measured = []
        for i, (residual, sublayer_context, key) in enumerate(self._iterate_residuals(context)):
            y_BxLxD = residual.sublayer(residual.before(x_BxLxD), sublayer_context)
            x_BxLxD = self._add(residual, x_BxLxD, y_BxLxD, key)
            if i + 1 in self.ends:
                measured.append(measure(x_BxLxD))
        return x_BxLxD, measured

    def carry(self, x_BxLxD: jax.Array, context: Context, states: tuple[State, ...]):
        """The parallel form of sequences that continue from states: B×L×D, and the states after them."""
        states_after = []
        for (residual, sublayer_context, key), state in zip(self._iterate_residuals(context), states, strict=True):
            y_BxLxD, state = residual.sublayer.prefill(residual.before(x_BxLxD), sublayer_context, state)
            x_BxLxD = self._add(residual, x_BxLxD, y_BxLxD, key)
            states_after.append(state)
        return x_BxLxD, tuple(states_after)

    def _iterate_residuals(self, context: Context) -> Iterator[tuple[Residual, Context, jax.Array | None]]:
        """Yields each sublayer with its norm, its context, and the key of the dropout after it."""
        for i, residual in enumerate(self.residuals()):
            folded_context = context.fold_in(i)
            # A sublayer that owns its residual applies dropout itself, so it gets the folded key.
            yield residual, folded_context if residual.sublayer.owns_residual else context, folded_context.dropout_key

    def _add(self, residual: Residual, x_BxLxD: jax.Array, y_BxLxD: jax.Array, key: jax.Array | None) -> jax.Array:
        """The residual stream after a sublayer whose output is y."""
        if not residual.sublayer.owns_residual:
            y_BxLxD = drop(y_BxLxD, self.dropout, key)
        return constrain_residual(residual.after(x_BxLxD, y_BxLxD))

    def init_state(self, batch_size: int, capacity: int) -> tuple[State, ...]:
        """The sublayers' states before the first token."""
        return tuple(sublayer.init_state(batch_size, capacity) for sublayer in self.sublayers)

    def cache_memory(self, x_BxMxD: jax.Array, lengths_B: jax.Array, states: tuple[State, ...]) -> tuple[State, ...]:
        """The sublayers' states with the keys and values of a source."""
        pairs = zip(self.sublayers, states, strict=True)
        return tuple(sublayer.cache_memory(x_BxMxD, lengths_B, state) for sublayer, state in pairs)

    def decode(self, method: str, x: jax.Array, context: Context, states: tuple[State, ...]):
        """`prefill` on B×L×D or `step` on B×D."""
        # Decoding has no dropout, so no keys are folded in.
        states_after = []
        for residual, state in zip(self.residuals(), states, strict=True):
            y, state = getattr(residual.sublayer, method)(residual.before(x), context, state)
            x = residual.after(x, y)
            states_after.append(state)
        return x, tuple(states_after)

    def flush(self, states: tuple[State, ...], positions_B: jax.Array) -> tuple[State, ...]:
        """Folds finished chunks into the states, see `Sublayer.flush`."""
        pairs = zip(self.sublayers, states, strict=True)
        return tuple(sublayer.flush(state, positions_B) for sublayer, state in pairs)

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Forward model FLOPs of the sublayers."""
        return sum(sublayer.flops_per_token(length, causal) for sublayer in self.sublayers)

    def penalty(self) -> jax.Array:
        """Sum of the sublayers' penalties."""
        penalties = [penalty for sublayer in self.sublayers if (penalty := sublayer.penalty()) is not None]
        return sum(penalties, start=jnp.zeros(()))

    def measures(self) -> dict[str, jax.Array]:
        """The sublayers' measures by name, concatenated."""
        by_sublayer = [sublayer.measures() for sublayer in self.sublayers]
        names = dict.fromkeys(name for measures in by_sublayer for name in measures)
        return {
            name: jnp.concatenate([measures[name].ravel() for measures in by_sublayer if name in measures])
            for name in names
        }


def stack(layers: Sequence[ModelConfig], count: int, *, rngs: nnx.Rngs) -> Block:
    """Builds `count` blocks as one module; its arrays have the blocks as their first dimension."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(layers, rngs=rngs)

    # Values that differ by layer, such as windows: each block of the stack gets those of its layers.
    stacked = make(rngs)
    for i, sublayer in enumerate(stacked.sublayers):
        numbers_N = np.arange(count, dtype=np.int32) * len(layers) + stacked.layer_and_index(i)[0]
        for name, values in sublayer.layer_arrays(numbers_N).items():
            setattr(sublayer, name, LayerArray(jnp.asarray(values)))
    return stacked


def unstack(stacked: Block, count: int) -> list[Block]:
    """The `count` blocks of `stack`, each with a copy of its parameters."""
    graph, parameters = nnx.split(stacked)
    take_block = lambda i: jax.tree.map(lambda x: x[i], parameters)
    return [nnx.merge(graph, take_block(i)) for i in range(count)]


def restack(stacked: Block, blocks: list[Block]) -> Block:
    """The inverse of `unstack`: `stacked` with a stacked copy of the blocks' parameters."""
    graph, _ = nnx.split(stacked)
    parameters = [nnx.split(block)[1] for block in blocks]
    return nnx.merge(graph, jax.tree.map(lambda *xs: jnp.stack(xs), *parameters))


def total_penalty(stacked: Block) -> jax.Array | None:
    """Sum over the layers; None: no sublayer has a penalty."""
    if all(type(sublayer).penalty is Sublayer.penalty for sublayer in stacked.sublayers):
        return None
    return jnp.sum(_map_blocks(stacked, Block.penalty))


def summarize_measures(stacked: Block) -> dict[str, jax.Array]:
    """The mean and the maximum over the layers of each measure: {"span_mean": …, "span_max": …}."""
    if all(type(sublayer).measures is Sublayer.measures for sublayer in stacked.sublayers):
        return {}
    measures, reductions = _map_blocks(stacked, Block.measures), {"mean": jnp.mean, "max": jnp.max}
    return {f"{name}_{kind}": reduce(x) for name, x in measures.items() for kind, reduce in reductions.items()}


def _map_blocks(stacked: Block, method: Callable[[Block], Any]) -> Any:
    """Applies a method to each block of a stack; the results are stacked."""
    # vmap over the parameters, since all blocks share one graph.
    graph, parameters = nnx.split(stacked)
    return jax.vmap(lambda block: method(nnx.merge(graph, block)))(parameters)


def constrain_residual(x_BxLxD: jax.Array) -> jax.Array:
    """Shards the batch of the residual stream over the mesh's data and fsdp axes, when there is a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x_BxLxD
    return jax.lax.with_sharding_constraint(x_BxLxD, jax.sharding.PartitionSpec(("data", "fsdp"), None, None))
