"""Parameters, decode state size and FLOPs of a family, computed from shapes without running it.

FLOPs are model FLOPs in closed form: those of the equations, whatever the program computes. XLA's cost analysis counts
a scanned layer once and recomputation twice, so it is of no use for utilisation.
"""

import dataclasses
import math
from typing import Any

import jax
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import FAMILIES
from flash_lm.layers.sublayer import Sublayer
from flash_lm.models.language_model import LanguageModel, build_model

# A matrix product has two gradients, each of them a product of the same FLOPs (PaLM, appendix B, counts the same way).
FORWARD_AND_BACKWARD = 3


@dataclasses.dataclass(frozen=True)
class Facts:
    """Parameters, decode state size and FLOPs of a family at one size.

    Attributes:
        config: complete config of the model.
        sublayers: class names of a layer's sublayers; a core's name follows that of its projections.
        parameters: number of trained parameters, at the config's max_length.
        state_bytes: bytes of decode state per sequence, by capacity in tokens; empty: decoding is not supported.
        flops: forward FLOPs per token, by sequence length.
    """

    config: ModelConfig
    sublayers: tuple[str, ...]
    parameters: int
    state_bytes: dict[int, int]
    flops: dict[int, float]

    @property
    def state_grows(self) -> bool:
        """Whether longer text needs a larger state."""
        return len(set(self.state_bytes.values())) > 1


def facts(family: str, config: Any, capacities: tuple[int, ...], lengths: tuple[int, ...]) -> Facts:
    """Computes the facts of a family.

    >>> from flash_lm.configs import base
    >>> config = base.get_config().model
    >>> config.vocab_size = 100
    >>> flash = facts("flash", config, capacities=(1024, 65536), lengths=(512,))
    >>> flash.state_grows, flash.parameters
    (False, 873209)

    Args:
        family: a row of the table.
        config: `config.model` of an experiment, with a vocabulary; it is copied for this family and each length.
        capacities: capacities of decode states, in tokens.
        lengths: sequence lengths, in tokens.
    """
    # A model per capacity and length, since positions and windows may depend on max_length; only shapes are made.
    causal = "causal" in FAMILIES[family].serves
    base_model = _model(family, config, config.max_length, causal)
    states = {}
    decodes = causal and not any(sublayer.undecodable for sublayer in base_model.layers.sublayers)
    for capacity in capacities if decodes else ():
        model = _model(family, config, capacity, causal)
        states[capacity] = _bytes(jax.eval_shape(lambda model=model, capacity=capacity: model.init_state(1, capacity)))
    # FLOPs, parameters and names of sublayers.
    flops = {length: _model(family, config, length, causal).flops_per_token(length) for length in lengths}
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(base_model, nnx.Param)))
    sublayers = tuple(_name(sublayer) for sublayer in base_model.layers.sublayers)
    return Facts(base_model.config, sublayers, parameters, states, flops)


def training_flops(model: LanguageModel, tokens: int, length: int) -> float:
    """Model FLOPs of one training step, 2mnk per product, only visible pairs; without recomputation and the update.

    >>> from flash_lm.configs import base
    >>> config = base.get_config().model
    >>> config.update(family="flash", vocab_size=100)
    >>> model = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    >>> training_flops(model, tokens=8192, length=512) == 3 * 8192 * model.flops_per_token(512)
    True

    Args:
        model: the model; it may have shapes instead of arrays.
        tokens: number of tokens per step.
        length: sequence length.
    """
    return FORWARD_AND_BACKWARD * tokens * model.flops_per_token(length)


def _model(family: str, config: Any, max_length: int, causal: bool) -> LanguageModel:
    """A model with shapes instead of arrays."""
    config = config.copy_and_resolve_references()
    config.update(family=family, causal=causal, max_length=max_length)
    return nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))


def _name(sublayer: Sublayer) -> str:
    core = getattr(sublayer, "core", None)
    return type(sublayer).__name__ + (f"({type(core).__name__})" if core else "")


def _bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
