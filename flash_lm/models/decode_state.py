"""What decoding carries from token to token."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The decode state of a whole model.

    Attributes:
        positions_B: number of tokens consumed in each row.
        layers: the sublayers' states, one tuple entry a sublayer, stacked over the layers (with a pattern: over its
            repetitions); after `apart`, a list of such tuples, unstacked.
        capacity: static; largest number of tokens if the state grows.
    """

    positions_B: jax.Array
    layers: Any
    capacity: int = dataclasses.field(metadata={"static": True})

    def apart(self) -> "DecodeState":
        """The state with separate arrays for each layer, so that a loop over tokens can write to them in place.

        A scan over stacked arrays would copy them all for each token.
        """
        count = jax.tree.leaves(self.layers)[0].shape[0]
        cut = lambda i: jax.tree.map(lambda x: x[i], self.layers)
        return dataclasses.replace(self, layers=[cut(i) for i in range(count)])
