"""The layers of a model beside those of another one of the same number and width, such as its teacher's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.registry import FAMILIES
from flash_lm.models.block import Block, Residual, constrain_residual
from flash_lm.models.language_model import LanguageModel
from flash_lm.models.model_inputs import ModelInputs


def mixer_of(block: Block, family: str) -> Residual:
    """The sublayer of a layer that mixes the tokens, with its norm."""
    return block.residuals()[FAMILIES[family].mixer]


def walk_layers(
    model: LanguageModel,
    inputs: ModelInputs,
    mix: Callable[[Callable[[jax.Array], jax.Array], jax.Array, Any], tuple[jax.Array, Any]],
    per_layer: Any,
) -> tuple[jax.Array, Any]:
    """Applies the layers of a model, with a function around each token mixer.

    Args:
        model: a model without `model.pattern`.
        inputs: a batch.
        mix: called with the layer's mixer, a function B×L×D -> B×L×D, its normalised input, and the values of its
            layer; returns the mixer's output to go on with, and anything, which is stacked over the layers.
        per_layer: arrays with the layers as their first dimension.

    Returns:
        The features, after the last norm, B×L×D; and the stacked results of `mix`.
    """
    x_BxLxD, context = model.embed(inputs)
    graph, stacked = nnx.split(model.layers)
    which = FAMILIES[model.config.family].mixer

    def body(x_BxLxD: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        parameters, index, values = xs
        block, of_layer, result = nnx.merge(graph, parameters), context.fold_in(index), None
        for i, residual in enumerate(block.residuals()):
            apply = lambda h_BxLxD, residual=residual: residual.sublayer(h_BxLxD, of_layer)
            h_BxLxD = residual.before(x_BxLxD)
            if i == which:
                y_BxLxD, result = mix(apply, h_BxLxD, values)
            else:
                y_BxLxD = apply(h_BxLxD)
            x_BxLxD = constrain_residual(residual.after(x_BxLxD, y_BxLxD))
        return x_BxLxD, result

    x_BxLxD, results = jax.lax.scan(
        body, constrain_residual(x_BxLxD), (stacked, jnp.arange(model.num_blocks), per_layer)
    )
    return model.norm(x_BxLxD), results
