"""Attention maps of every layer of a model: the weights of the values in each token's output."""

import dataclasses

import jax

from flash_lm.layers.attention import AttentionSublayer
from flash_lm.models.language_model import LanguageModel
from flash_lm.models.model_inputs import ModelInputs


@dataclasses.dataclass(frozen=True)
class AttentionMap:
    """The attention map of one term of a sublayer.

    Attributes:
        layer: index of the layer.
        sublayer: index of the sublayer in the layer.
        term: "attention"; or "local" and "global" of mixed chunks; and "exp(w)", AFT's position bias.
        weights_BxHxLxL: float32, one row per query, one column per key; invisible pairs are zero. They are factors of
            the values: after a softmax they sum to one, otherwise not always. For AFT, a mean over channels.
    """

    layer: int
    sublayer: int
    term: str
    weights_BxHxLxL: jax.Array


def attention_weights(
    model: LanguageModel, inputs_BxL: jax.Array, segment_ids: jax.Array | None = None
) -> list[AttentionMap]:
    """Computes the attention maps of all layers, from first to last.

    Memory grows with the square of the length, and time with the cube.

    >>> import jax.numpy as jnp
    >>> from flash_lm import build_model
    >>> from flash_lm.configs import base
    >>> from flax import nnx
    >>> config = base.get_config().model
    >>> config.update(family="transformer", vocab_size=100, num_layers=1, model_dim=32)
    >>> model = build_model(config, rngs=nnx.Rngs(0))
    >>> (attention,) = attention_weights(model, jnp.arange(8)[None])
    >>> attention.weights_BxHxLxL.shape
    (1, 4, 8, 8)
    >>> bool(jnp.allclose(attention.weights_BxHxLxL.sum(-1), 1))  # softmax
    True

    Args:
        model: a model of any family.
        inputs_BxL: token ids; use few.
        segment_ids: B×L; None: one document per sequence.

    Raises:
        InputError: sequences are longer than the positions allow.
    """
    # The forward pass layer by layer; at each attention sublayer also the weights of its terms.
    x_BxLxD, context = model.embed(ModelInputs(inputs_BxL, segment_ids))
    maps = []
    for n, block in enumerate(model.unstacked_blocks()):
        for i, residual in enumerate(block.residuals()):
            before_BxLxD, sublayer = residual.before(x_BxLxD), residual.sublayer
            if isinstance(sublayer, AttentionSublayer):
                layer, number = block.layer_and_index(i)
                layer += n * len(block.ends)
                maps += [AttentionMap(layer, number, *one) for one in sublayer.weights(before_BxLxD, context).items()]
            x_BxLxD = residual.after(x_BxLxD, sublayer(before_BxLxD, context))
    return maps
