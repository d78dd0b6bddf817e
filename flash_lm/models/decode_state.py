"""What decoding carries from token to token."""

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
        positions_B: number of tokens consumed in each row.
        layers: the sublayers' states, one tuple entry a sublayer, stacked over the layers (with a pattern: over its
            repetitions); after `unstacked`, a list of such tuples, unstacked.
        capacity: static; largest number of tokens if the state grows.
    """

    positions_B: jax.Array
    layers: Any
    capacity: int = dataclasses.field(metadata={"static": True})

    def next_positions(self, length: int) -> jax.Array:
        """The positions of the next tokens of each row, B×L."""
        return self.positions_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]

    def tree(self) -> dict[str, Any]:
        """The arrays as plain containers, for a checkpoint."""
        return {"positions": self.positions_B, "layers": self.layers}

    def from_tree(self, tree: dict[str, Any]) -> "DecodeState":
        """The state from the result of `tree`."""
        return DecodeState(tree["positions"], tree["layers"], self.capacity)

    def with_rows(self, which_B: jax.Array, other: "DecodeState") -> "DecodeState":
        """The state with these rows as they are in another one."""

        def chosen(axis: int, old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(which_B.reshape(*[1] * axis, -1, *[1] * (old.ndim - axis - 1)), new, old)

        layers = jax.tree.map(functools.partial(chosen, 1), self.layers, other.layers)
        return DecodeState(chosen(0, self.positions_B, other.positions_B), layers, self.capacity)

    def split_microbatches(self, count: int) -> "DecodeState":
        """`count` states, stacked; row r goes into state r mod `count`."""

        def of(axis: int, x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, count, *x.shape[axis + 1 :]), axis + 1, 0)

        return DecodeState(of(0, self.positions_B), jax.tree.map(functools.partial(of, 1), self.layers), self.capacity)

    def merge_microbatches(self) -> "DecodeState":
        """The inverse of `cut`."""

        def of(axis: int, x: jax.Array) -> jax.Array:
            rows = jnp.moveaxis(x, 0, axis + 1)
            return rows.reshape(*rows.shape[:axis], -1, *rows.shape[axis + 2 :])

        return DecodeState(of(0, self.positions_B), jax.tree.map(functools.partial(of, 1), self.layers), self.capacity)

    def unstacked(self) -> "DecodeState":
        """The state with separate arrays for each layer, so that a loop over tokens can write to them in place.

        A scan over stacked arrays would copy them all for each token.
        """
        count = jax.tree.leaves(self.layers)[0].shape[0]
        split_microbatches = lambda i: jax.tree.map(lambda x: x[i], self.layers)
        return dataclasses.replace(self, layers=[split_microbatches(i) for i in range(count)])
