"""What decoding carries from token to token."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state of a whole model.

    Attributes:
        positions_B: tokens that each row has consumed.
        layers: the sublayers' states, one tuple entry a sublayer, stacked over the layers (with a pattern: over its
            repetitions); or, after `apart`, a list of them.
        capacity: static: largest number of tokens of a state that grows.
    """

    positions_B: jax.Array
    layers: Any
    capacity: int = dataclasses.field(metadata={"static": True})

    def apart(self) -> "DecodeState":
        """With arrays of its own for each layer: a loop over tokens can then write to them in place.

        A scan over stacked ones copies them all for each token.
        """
        count = jax.tree.leaves(self.layers)[0].shape[0]
        cut = lambda i: jax.tree.map(lambda x: x[i], self.layers)
        return dataclasses.replace(self, layers=[cut(i) for i in range(count)])
