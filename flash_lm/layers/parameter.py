"""What a parameter says of itself, so that optimizer and mesh need not guess it from its name.

    nnx.Param(value)                 a matrix if it has two dimensions or more (the stacked layers' not counted)
    nnx.Param(value, **VECTORS)      gains, offsets, biases, filters: vectors, however many of them there are
    nnx.Param(value, rate=3.0)       the optimizer moves it three times as far a step

Matrices are decayed, and cut over the devices; vectors are neither.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

VECTORS = {"matrix": False}


@dataclasses.dataclass(frozen=True)
class Traits:
    """Of each parameter, as trees like the parameters: whether it is a matrix, and its part of the learning rate."""

    matrix: Any
    rate: Any


def traits(parameters: nnx.State) -> Traits:
    """What the parameters of a model say; `parameters`: of Variables, with shapes at least."""

    def matrix(path: tuple, variable: nnx.Variable) -> bool:
        return variable.get_metadata().get("matrix", len(variable.shape) - is_stacked(path) >= 2)

    def rate(path: tuple, variable: nnx.Variable) -> float:
        del path
        return variable.get_metadata().get("rate", 1.0)

    return Traits(_tree(parameters, matrix), _tree(parameters, rate))


def is_stacked(path: tuple) -> bool:
    """Whether a parameter's first dimension is that of the layers; `path`: from the model on."""
    first = path[0]
    return getattr(first, "key", first) == "layers"


def _tree(parameters: nnx.State, say: Any) -> Any:
    told = {path: say(path, variable) for path, variable in nnx.to_flat_state(parameters)}
    # Through the parameters' own structure, so that keys are those of the train state.
    plain = nnx.to_pure_dict(parameters)
    return jax.tree_util.tree_map_with_path(lambda path, _: told[tuple(key.key for key in path)], plain)
