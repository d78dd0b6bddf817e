"""A model's parameters while it decodes: in memory once, whichever form they have."""

import dataclasses
import functools

import jax

from flash_lm.models.language_model import LanguageModel
from flash_lm.models.period import Period
from flash_lm.training.state import ModelFunction, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Apart:
    """What a loop over tokens reads: the layers' parameters in arrays of their own, and those around the layers."""

    around: Params
    layers: list[Period]


class HeldParams:
    """Parameters that are stacked over the layers, as training has them, until a decode loop wants them apart.

    A slice of a stack would be copied for each token, and a copy of each layer beside the stack would hold all of it
    twice. So the stack goes when the copies are made, unless somebody else has kept it.

    Attributes:
        model: whose parameters they are.
    """

    def __init__(self, model: ModelFunction, params: Params):
        """Copies nothing."""
        self.model = model
        self._held: Params | Apart = params

    @property
    def stacked(self) -> Params:
        """Nested dicts of arrays, stacked over the layers; a new copy of the layers if they are held apart."""
        return self._stacked(self._held) if isinstance(self._held, Apart) else self._held

    @property
    def apart(self) -> Apart:
        """Each layer's in arrays of their own; held in this form from now on."""
        if not isinstance(self._held, Apart):
            layers = jax.jit(lambda params: self.model.bind(params).periods_apart())(self._held)
            self._held = Apart({name: part for name, part in self._held.items() if name != "layers"}, layers)
        return self._held

    def bind(self, apart: Apart) -> LanguageModel:
        """The model with these parameters, in a function that is compiled: what it does not use is not stacked."""
        return self.model.bind_apart(apart.around, apart.layers)

    @functools.cached_property
    def _stacked(self):
        return jax.jit(lambda apart: self.model.params_of(self.bind(apart)))
