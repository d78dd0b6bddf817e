"""`TrainState`, the explicit state of training, and `ModelFunction`, a model as a function of its parameters."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.layers.parameter import Traits, traits
from flash_lm.layers.sublayer import LayerArray
from flash_lm.models.block import Block
from flash_lm.models.decode_state import DecodeState
from flash_lm.models.language_model import LanguageModel

Params = dict[str, Any]  # nested dicts of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The arrays of a checkpoint.

    Attributes:
        step: number of steps done, int32.
        params: the parameters.
        opt_state: the optimizer's state.
        constants: random arrays that are never trained; the model computes with its copy of them.
        carried: the decode state before each sequence of the next batch; None: without `train.carry_state`.
        ema: the exponential moving average of the parameters; None: without `train.ema`.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    constants: Params = dataclasses.field(default_factory=dict)
    carried: DecodeState | None = None
    ema: Params | None = None


class ModelFunction:
    """A LanguageModel separated from its parameters, so that the step is a function of one plain pytree.

    Attributes:
        config: config of the model.
        seed: seed of the first parameters and of the constants.
        packed: whether a sequence may hold several documents.
        few_targets: whether the loss may count few tokens of a sequence, see `cross_entropy`.
        abstract: the model with shapes instead of arrays.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        *,
        packed: bool = True,
        few_targets: bool = False,
        check: Callable[[Params, Params], None] = lambda params, constants: None,
    ):
        """Traces the model of a complete config; computes only its constants.

        Args:
            config: config of the model.
            seed: seed of the first parameters and of the constants.
            packed: whether a sequence may hold several documents.
            few_targets: whether the loss may count few tokens of a sequence.
            check: called with the shapes of parameters and constants, before anything is computed.
        """
        # Only shapes: large models are never built on one device.
        self.config, self.seed, self.packed, self.few_targets = config, seed, packed, few_targets
        self.abstract = nnx.eval_shape(self._build)
        self._graph, self._params, self._constants = nnx.split(self.abstract, nnx.Param, ...)
        check(nnx.to_pure_dict(self._params), nnx.to_pure_dict(self._constants))
        if jax.tree.leaves(self._constants):
            # Under jit, so that unused parameters are not made; on the host, so that no device holds them.
            self._constants = jax.device_get(jax.jit(lambda: nnx.split(self._build(), nnx.Param, ...)[2])())

    def init(self) -> Params:
        """Initialises the parameters."""
        return self.get_params(self._build())

    def bind(self, params: Params) -> LanguageModel:
        """The model with these parameters; missing ones stay shapes."""
        state = jax.tree.map(lambda leaf: leaf, self._params)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state, self._constants)

    def bind_unstacked(self, around: Params, blocks: list[Block]) -> LanguageModel:
        """The model with the `unstacked_blocks` of another one, and parameters for all but the blocks."""
        model = self.bind(around)
        model.restack(blocks)
        return model

    def get_params(self, model: LanguageModel) -> Params:
        """The parameters of a model from `bind`."""
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    @property
    def constants(self) -> Params:
        """Arrays that are never trained: random ones, and values that differ by layer; empty for most families."""
        return nnx.to_pure_dict(self._constants)

    def replace_packing(self, *, packed: bool, few_targets: bool) -> "ModelFunction":
        """The same model, for sequences with or without several documents, with few targets or many."""
        other = copy.copy(self)
        other.packed, other.few_targets = packed, few_targets
        return other

    def replace_constants(self, constants: Params) -> "ModelFunction":
        """The same model with other random arrays, such as those of a checkpoint; they may be traced.

        Values that differ by layer, such as windows, follow from the config, so the model keeps its own.
        """
        other = copy.copy(self)
        other._constants = jax.tree.map(lambda leaf: leaf, self._constants)
        nnx.replace_by_pure_dict(other._constants, constants)
        of_config = nnx.filter_state(self._constants, LayerArray)
        nnx.replace_by_pure_dict(other._constants, nnx.to_pure_dict(of_config))
        return other

    def traits(self) -> Traits:
        """The traits of each parameter."""
        return traits(self._params)

    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(x.size for x in jax.tree.leaves(self._params))

    def _build(self) -> LanguageModel:
        return LanguageModel(self.config, rngs=nnx.Rngs(self.seed))


def init_state(
    model: ModelFunction, optimizer: optax.GradientTransformation, carried_rows: int | None = None, ema: bool = False
) -> TrainState:
    """The state before the first step.

    Args:
        model: the model.
        optimizer: its optimizer.
        carried_rows: batch size of the carried state; None: without one.
        ema: whether the state has an average of the parameters.

    Raises:
        InputError: the model's state cannot be carried.
    """
    if carried_rows is not None:
        model.abstract.check_carried()
    params = model.init()
    carried = None if carried_rows is None else model.bind(params).init_state(carried_rows)
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), model.constants, carried, average)
