"""The decode state of a model: caches and sums of all sublayers, and the number of tokens consumed."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The decode state of a whole model.

    Attributes:
        positions_B: number of tokens consumed per sequence.
        layers: the sublayers' states, one tuple entry per sublayer, stacked over the layers (with a pattern: over its
            repetitions); after `unstack`, a list of such tuples, one per block.
        capacity: static; largest number of tokens if the state grows.

    >>> DecodeState(jnp.array([3, 5]), layers=(), capacity=8).next_positions(2).tolist()
    [[3, 4], [5, 6]]
    """

    positions_B: jax.Array
    layers: Any
    capacity: int = dataclasses.field(metadata={"static": True})

    def next_positions(self, length: int) -> jax.Array:
        """The positions of the next `length` tokens, B×L."""
        return self.positions_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]

    def tree(self) -> dict[str, Any]:
        """The arrays in plain containers, for a checkpoint."""
        return {"positions": self.positions_B, "layers": self.layers}

    def from_tree(self, tree: dict[str, Any]) -> "DecodeState":
        """The inverse of `tree`, with this state's capacity."""
        return DecodeState(tree["positions"], tree["layers"], self.capacity)

    def replace_rows(self, which_B: jax.Array, other: "DecodeState") -> "DecodeState":
        """The state with the sequences where `which_B` is true replaced by those of another state."""

        def select(axis: int, old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(which_B.reshape(*[1] * axis, -1, *[1] * (old.ndim - axis - 1)), new, old)

        # Stacked states have the batch as their second dimension, after the blocks.
        layers = jax.tree.map(functools.partial(select, 1), self.layers, other.layers)
        return DecodeState(select(0, self.positions_B, other.positions_B), layers, self.capacity)

    def split_microbatches(self, count: int) -> "DecodeState":
        """Splits the batch into `count` states, stacked; sequence r goes into state r mod `count`."""

        def split_axis(axis: int, x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, count, *x.shape[axis + 1 :]), axis + 1, 0)

        return DecodeState(
            split_axis(0, self.positions_B), jax.tree.map(functools.partial(split_axis, 1), self.layers), self.capacity
        )

    def merge_microbatches(self) -> "DecodeState":
        """The inverse of `split_microbatches`."""

        def merge_axis(axis: int, x: jax.Array) -> jax.Array:
            rows = jnp.moveaxis(x, 0, axis + 1)
            return rows.reshape(*rows.shape[:axis], -1, *rows.shape[axis + 2 :])

        return DecodeState(
            merge_axis(0, self.positions_B), jax.tree.map(functools.partial(merge_axis, 1), self.layers), self.capacity
        )

    def unstack(self) -> "DecodeState":
        """Separates the arrays of each block, so that a loop over tokens can update them in place.

        A scan over stacked arrays would copy all of them for each token.
        """
        # The stacked arrays have the blocks as their first dimension, those of one block the batch.
        count = jax.tree.leaves(self.layers)[0].shape[0]
        take_block = lambda i: jax.tree.map(lambda x: x[i], self.layers)
        return dataclasses.replace(self, layers=[take_block(i) for i in range(count)])
