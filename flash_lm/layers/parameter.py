"""What a parameter says of itself, so that optimizer and mesh need not guess it from its name.

    nnx.Param(value)                 a matrix if it has two dimensions or more (the stacked layers' not counted)
    nnx.Param(value, **VECTORS)      gains, offsets, biases, filters: vectors, however many of them there are
    nnx.Param(value, rate=3.0)       the optimizer moves it three times as far a step
    nnx.Param(value, project=f)      after each step it is f of what it would be (of one layer's, where it is stacked)
    nnx.Param(value, positions=True) its first dimension (of one layer's) is the position, up to model.max_length

Matrices are decayed, and cut over the devices; vectors are neither.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

VECTORS = {"matrix": False}


@dataclasses.dataclass(frozen=True)
class Traits:
    """Of each parameter, as trees like the parameters.

    Attributes:
        matrix: whether it is one.
        rate: its part of the learning rate.
        project: what it is put through after a step; False: nothing.
        positions: whether it has a vector for each position.
    """

    matrix: Any
    rate: Any
    project: Any
    positions: Any


def traits(parameters: nnx.State) -> Traits:
    """What the parameters of a model say; `parameters`: of Variables, with shapes at least."""

    def matrix(path: tuple, variable: nnx.Variable) -> bool:
        return variable.get_metadata().get("matrix", len(variable.shape) - is_stacked(path) >= 2)

    def said(name: str, default: Any) -> Callable[[tuple, nnx.Variable], Any]:
        return lambda path, variable: variable.get_metadata().get(name, default)

    rules = (matrix, said("rate", 1.0), said("project", False), said("positions", False))
    return Traits(*(_tree(parameters, say) for say in rules))


def name_of(path: tuple) -> str:
    """A parameter's name, as `mesh.rules` and `train.freeze` have it; `path`: from the model on."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_stacked(path: tuple) -> bool:
    """Whether a parameter's first dimension is that of the layers; `path`: from the model on."""
    first = path[0]
    return getattr(first, "key", first) == "layers"


def _tree(parameters: nnx.State, say: Any) -> Any:
    told = {path: say(path, variable) for path, variable in nnx.to_flat_state(parameters)}
    # Through the parameters' own structure, so that keys are those of the train state.
    plain = nnx.to_pure_dict(parameters)
    return jax.tree_util.tree_map_with_path(lambda path, _: told[tuple(key.key for key in path)], plain)
