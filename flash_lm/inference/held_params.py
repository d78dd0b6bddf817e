"""A model's parameters while it decodes: kept in memory once, stacked over the layers or unstacked."""

import dataclasses
import functools

import jax

from flash_lm.models.block import Block
from flash_lm.models.language_model import LanguageModel
from flash_lm.training.train_state import ModelFunction, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Apart:
    """Unstacked parameters for a loop over tokens: each layer's in separate arrays, and those around the layers."""

    around: Params
    layers: list[Block]


class HeldParams:
    """Parameters that are stacked over the layers, as in training, until a decode loop needs them unstacked.

    A slice of a stack would be copied for each token, and copies of the layers beside the stack would take twice the
    memory. So the stack is dropped when the copies are made, unless the caller keeps it.

    Attributes:
        model: the model that has these parameters.
    """

    def __init__(self, model: ModelFunction, params: Params):
        """Copies nothing."""
        self.model = model
        self._held: Params | Apart = params

    @property
    def stacked(self) -> Params:
        """Nested dicts of arrays, stacked over the layers; a new copy of the layers if they are held unstacked."""
        return self._stacked(self._held) if isinstance(self._held, Apart) else self._held

    @property
    def apart(self) -> Apart:
        """The unstacked parameters; held in this form from now on."""
        if not isinstance(self._held, Apart):
            layers = jax.jit(lambda params: self.model.bind(params).unstacked_blocks())(self._held)
            self._held = Apart({name: part for name, part in self._held.items() if name != "layers"}, layers)
        return self._held

    def bind(self, apart: Apart) -> LanguageModel:
        """The model with these parameters, inside a compiled function, where unused parameters are never stacked."""
        return self.model.bind_unstacked(apart.around, apart.layers)

    @functools.cached_property
    def _stacked(self):
        return jax.jit(lambda apart: self.model.params_of(self.bind(apart)))
