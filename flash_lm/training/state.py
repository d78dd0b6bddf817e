"""The explicit state of training, and the model as a function of its parameters."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.parameter import Traits, traits
from flash_lm.models.language_model import LanguageModel
from flash_lm.models.period import Period

Params = dict[str, Any]  # nested, of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that is saved: number of steps done (int32), parameters, optimizer state, and what no step changes.

    Constants are drawn and never trained; the model computes with its own copy of them.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    constants: Params = dataclasses.field(default_factory=dict)


class ModelFunction:
    """A LanguageModel apart from its parameters, so that the step is a function of one plain pytree.

    Attributes:
        config: of the model.
        seed: of its first parameters, and of what is drawn and never trained.
        packed: whether a row of its batches may hold several documents.
        abstract: the model with shapes in place of arrays.
    """

    def __init__(self, config: ModelConfig, seed: int, *, packed: bool = True):
        """Traces the model of a completed config; computes its untrained constants and nothing else."""
        self.config, self.seed, self.packed = config, seed, packed
        self.abstract = nnx.eval_shape(self._build)
        self._graph, self._params, self._constants = nnx.split(self.abstract, nnx.Param, ...)
        if jax.tree.leaves(self._constants):
            # Under jit, so that parameters which nobody asks for are not made; on the host, so that no device has them.
            self._constants = jax.device_get(jax.jit(lambda: nnx.split(self._build(), nnx.Param, ...)[2])())

    def init(self) -> Params:
        """Draws the parameters."""
        return self.params_of(self._build())

    def bind(self, params: Params) -> LanguageModel:
        """The model with these parameters; those that are left out stay shapes."""
        state = jax.tree.map(lambda leaf: leaf, self._params)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state, self._constants)

    def bind_apart(self, around: Params, layers: list[Period]) -> LanguageModel:
        """The model with the `periods_apart` of another one, and the parameters around them."""
        model = self.bind(around)
        model.put_together(layers)
        return model

    def params_of(self, model: LanguageModel) -> Params:
        """The parameters of a model that `bind` has made."""
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    @property
    def constants(self) -> Params:
        """What was drawn and is never trained; empty for most families."""
        return nnx.to_pure_dict(self._constants)

    def of_rows(self, *, packed: bool) -> "ModelFunction":
        """The same model for rows that may hold several documents, or that do not."""
        other = copy.copy(self)
        other.packed = packed
        return other

    def with_constants(self, constants: Params) -> "ModelFunction":
        """The same model with other constants, such as those of a checkpoint."""
        other = copy.copy(self)
        other._constants = jax.tree.map(lambda leaf: leaf, self._constants)
        nnx.replace_by_pure_dict(other._constants, jax.device_get(constants))
        return other

    def traits(self) -> Traits:
        """What each parameter says of itself."""
        return traits(self._params)

    def parameter_count(self) -> int:
        """Number of scalars in the parameters."""
        return sum(x.size for x in jax.tree.leaves(self._params))

    def _build(self) -> LanguageModel:
        return LanguageModel(self.config, rngs=nnx.Rngs(self.seed))


def init_state(model: ModelFunction, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    params = model.init()
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), model.constants)
