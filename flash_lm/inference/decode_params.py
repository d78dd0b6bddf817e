"""A model's parameters for decoding: one copy in memory, stacked over the layers or unstacked."""

import dataclasses
import functools

import jax

from flash_lm.models.block import Block
from flash_lm.models.language_model import LanguageModel
from flash_lm.training.train_state import ModelFunction, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unstacked:
    """Parameters for a loop over tokens: a module per block, and the parameters outside the layers."""

    around: Params
    blocks: list[Block]


class DecodeParams:
    """Parameters that are stacked over the layers, as in training, until a decode loop needs them unstacked.

    A loop over tokens would copy the slice of each layer for each token, and copies of the layers in addition to the
    stack would take twice the memory. So the stack is dropped when the copies are made, unless the caller keeps it.

    Attributes:
        model: the model of these parameters.
    """

    def __init__(self, model: ModelFunction, params: Params):
        """Copies nothing."""
        self.model = model
        self._params: Params | Unstacked = params

    @property
    def stacked(self) -> Params:
        """Nested dicts of arrays, stacked over the layers; a new copy of the layers if they are kept unstacked."""
        return self._stack(self._params) if isinstance(self._params, Unstacked) else self._params

    @property
    def unstacked(self) -> Unstacked:
        """The unstacked parameters; they are stored in this form from now on."""
        if not isinstance(self._params, Unstacked):
            blocks = jax.jit(lambda params: self.model.bind(params).unstacked_blocks())(self._params)
            self._params = Unstacked({name: x for name, x in self._params.items() if name != "layers"}, blocks)
        return self._params

    def bind(self, unstacked: Unstacked) -> LanguageModel:
        """The model with these parameters, inside a compiled function, where unused parameters are never stacked."""
        return self.model.bind_unstacked(unstacked.around, unstacked.blocks)

    @functools.cached_property
    def _stack(self):
        return jax.jit(lambda unstacked: self.model.get_params(self.bind(unstacked)))
