"""The classification head: pools a sequence to one vector, and maps it to a logit for each label."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flash_lm.config.keys import at_least, key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.errors import InputError
from flash_lm.layers.dense import NEVER, Dense
from flash_lm.layers.parameter import VECTORS
from flash_lm.models.output_heads import HeadInputs, HeadKind, Losses, register_head, weighted_sum


def _mean(features_BxLxD: jax.Array, real_BxL: jax.Array) -> jax.Array:
    """Mean over the tokens that are not padding, summed in float32."""
    # bfloat16 would lose small features in a sum over a long sequence.
    weights_BxLx1 = real_BxL[..., None].astype(jnp.float32)
    sums_BxD = (features_BxLxD.astype(jnp.float32) * weights_BxLx1).sum(axis=1)
    return (sums_BxD / jnp.maximum(weights_BxLx1.sum(axis=1), 1)).astype(features_BxLxD.dtype)


def _first(features_BxLxD: jax.Array, real_BxL: jax.Array) -> jax.Array:
    del real_BxL
    return features_BxLxD[:, 0]


def _last(features_BxLxD: jax.Array, real_BxL: jax.Array) -> jax.Array:
    last_Bx1x1 = jnp.maximum(real_BxL.sum(axis=1, dtype=jnp.int32) - 1, 0)[:, None, None]
    return jnp.take_along_axis(features_BxLxD, last_Bx1x1, axis=1)[:, 0]


POOLS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"mean": _mean, "first": _first, "last": _last}

CLASSIFIER = "classifier"  # its parameters' name in a model


@section("model.classes")
class ClassOptions:
    """Options of model.head=classes."""

    count: int = key(None, "labels; open: as many as the corpus has", at_least(2))
    pool: str = key(
        "mean",
        "mean, first or last: which tokens' features describe a sequence; in a causal model only last, and part of "
        "mean, have seen all of it",
        one_of(*POOLS),
    )


class Classifier(nnx.Module):
    """A linear map with a bias, from D to the labels."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Initialises the map by config.init; the bias is zero."""
        count = _count(config)
        self.map = Dense(config.model_dim, count, config, rngs=rngs, biased=NEVER)  # whatever model.biases
        self.bias = nnx.Param(jnp.zeros(count, jnp.dtype(config.param_dtype)), **VECTORS)


class ClassHead(NamedTuple):
    """softmax(features · kernel + bias), over labels; features are one vector per sequence, so L is 1."""

    kernel_DxC: jax.Array
    bias_C: jax.Array

    def logits(self, features_xD: jax.Array) -> jax.Array:
        """…×C float32."""
        kernel_DxC = self.kernel_DxC.astype(features_xD.dtype)
        logits_xC = jnp.matmul(features_xD, kernel_DxC, preferred_element_type=jnp.float32)
        return logits_xC + jnp.broadcast_to(self.bias_C.astype(jnp.float32), logits_xC.shape)

    def loss(self, inputs: HeadInputs, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Losses:
        """See `Head`; labels are few, so nothing is computed in chunks, and there are no penalties."""
        del z_loss, label_smoothing
        return weighted_sum(self.scores(inputs)["nll"], inputs.weights_BxL), {}

    def scores(self, inputs: HeadInputs) -> dict[str, jax.Array]:
        """See `Head`; and "confusion", with a 1 at the label (first axis) and the prediction (second), B×L×C×C."""
        # Sums of "confusion" over examples are the confusion matrix.
        logits_BxLxC = self.logits(inputs.features_BxLxD)
        nll_BxL = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxC, inputs.targets_BxL)
        one_hot = lambda x_BxL: jax.nn.one_hot(x_BxL, logits_BxLxC.shape[-1])
        label_BxLxC, predicted_BxLxC = one_hot(inputs.targets_BxL), one_hot(logits_BxLxC.argmax(axis=-1))
        confusion_BxLxCxC = label_BxLxC[..., :, None] * predicted_BxLxC[..., None, :]
        return {"nll": nll_BxL, "hits": (label_BxLxC * predicted_BxLxC).sum(axis=-1), "confusion": confusion_BxLxCxC}


def _pool(config: ModelConfig, features_BxLxD: jax.Array, real_BxL: jax.Array) -> jax.Array:
    return POOLS[config[ClassOptions].pool](features_BxLxD, real_BxL)


def _count(config: ModelConfig) -> int:
    count = config[ClassOptions].count
    if count is None:
        raise InputError("model.classes.count is open: set it, or train on a corpus with labels, which defines it")
    return count


def _classifier(config: ModelConfig, rngs: nnx.Rngs) -> Mapping[str, nnx.Module]:
    return {CLASSIFIER: Classifier(config, rngs=rngs)}


def _bind(model: Any) -> ClassHead:
    return ClassHead(model.classifier.map.kernel[...], model.classifier.bias[...])


register_head("classes", HeadKind(_bind, _count, _classifier, (ClassOptions,), pool=_pool))
