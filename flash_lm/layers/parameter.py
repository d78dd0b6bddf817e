"""Traits of parameters (matrix or vector, learning rate factor, projection) for the optimizer and the mesh.

        nnx.Param(value)                 a matrix if it has two dimensions or more (without that of stacked layers)
        nnx.Param(value, **VECTORS)      gains, offsets, biases, filters: vectors, even with several dimensions
        nnx.Param(value, rate=3.0)       the optimizer's steps are three times as large
        nnx.Param(value, project=f)      after each step it is replaced by f(value) (one layer's value, if stacked)
        nnx.Param(value, positions=True) its first dimension (of one layer) is the position, up to model.max_length

Matrices have weight decay and are sharded over devices; vectors are neither decayed nor sharded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

VECTORS = {"matrix": False}


@dataclasses.dataclass(frozen=True)
class Traits:
    """The traits of all parameters, as trees with the structure of the parameters.

    Attributes:
        matrix: whether it is a matrix.
        hidden: whether it is a matrix of a layer that maps features to features: no embedding, and no table of
            positions.
        rate: factor of the learning rate.
        project: function applied after each step; False: none.
        positions: whether it has one vector for each position.
    """

    matrix: Any
    hidden: Any
    rate: Any
    project: Any
    positions: Any


def traits(parameters: nnx.State) -> Traits:
    """The traits of a model's parameters; `parameters`: Variables that have at least shapes."""

    def matrix(path: tuple, variable: nnx.Variable) -> bool:
        return variable.get_metadata().get("matrix", len(variable.shape) - is_stacked(path) >= 2)

    def declared(name: str, default: Any) -> Callable[[tuple, nnx.Variable], Any]:
        return lambda path, variable: variable.get_metadata().get(name, default)

    def hidden(path: tuple, variable: nnx.Variable) -> bool:
        return matrix(path, variable) and is_stacked(path) and not variable.get_metadata().get("positions", False)

    # One tree per trait, with the structure of the parameters.
    rules = (matrix, hidden, declared("rate", 1.0), declared("project", False), declared("positions", False))
    return Traits(*(_tree(parameters, say) for say in rules))


def parameter_name(path: tuple) -> str:
    """A parameter's name, as in `mesh.rules` and `train.freeze`; `path`: path from the model."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_stacked(path: tuple) -> bool:
    """Whether a parameter's first dimension is the stacked layers; `path`: path from the model."""
    return any(getattr(part, "key", part) == "layers" for part in path[:2])  # those of an encoder, too


def _tree(parameters: nnx.State, say: Any) -> Any:
    # Traits are metadata of the variables, which the train state does not have.
    by_path = {path: say(path, variable) for path, variable in nnx.to_flat_state(parameters)}
    # Through the structure of the parameters, so that the keys are the same as in the train state.
    plain = nnx.to_pure_dict(parameters)
    return jax.tree_util.tree_map_with_path(lambda path, _: by_path[tuple(key.key for key in path)], plain)
