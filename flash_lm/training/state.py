"""The explicit state of training, and the model as a function of its parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.models.language_model import LanguageModel

Params = dict[str, Any]  # nested, of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes: number of steps done (int32), parameters, optimizer state."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState


class ModelFunction:
    """A LanguageModel apart from its parameters, so that the step is a function of one plain pytree.

    Attributes:
        config: of the model.
        abstract: the model with shapes in place of arrays.
    """

    def __init__(self, config: ModelConfig):
        """Traces the model of a completed config without computing anything."""
        self.config = config
        self.abstract = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
        self._graph = nnx.graphdef(self.abstract)

    def init(self, seed: int) -> Params:
        """Draws the parameters."""
        return nnx.to_pure_dict(nnx.state(LanguageModel(self.config, rngs=nnx.Rngs(seed)), nnx.Param))

    def bind(self, params: Params) -> LanguageModel:
        """The model with these parameters."""
        state = nnx.state(self.abstract, nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state)

    def parameter_count(self) -> int:
        """Number of scalars in the parameters."""
        return sum(x.size for x in jax.tree.leaves(nnx.state(self.abstract, nnx.Param)))


def init_state(model: ModelFunction, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step."""
    params = model.init(seed)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
