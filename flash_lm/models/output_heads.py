"""The table of output heads, which map features to a distribution over the vocabulary.

`softmax` has a logit for each word; `logistics` is a mixture of discretised logistics over ordered values.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import HEADS
from flash_lm.layers.dense import EMBEDDING_INITS, NEVER, Dense
from flash_lm.ops.cross_entropy import cross_entropy, soft_capped, token_scores
from flash_lm.ops.logistics import VALUES, mixture_log_probs

_PACE, _LOG_SCALE = 0.1, -3.0  # logistics: relative learning rate of means and scales, and initial log-scale

Losses = tuple[jax.Array, dict[str, jax.Array]]  # the loss, and the penalties in it by name


class HeadInputs(NamedTuple):
    """The inputs of a head's loss and scores.

    Attributes:
        features_BxLxD: features per token, or per sequence, where L is 1.
        targets_BxL: token or label ids to predict.
        weights_BxL: weight of each target in the loss; 0: not a target.
        chunk: tokens whose logits exist at the same time on a device, see `cross_entropy`; None: as many as suit it.
        parts: number of shards of the batch, see `cross_entropy`.
        few_targets: whether most weights may be 0, so that it pays to find the targets.
    """

    features_BxLxD: jax.Array
    targets_BxL: jax.Array
    weights_BxL: jax.Array
    chunk: int | None
    parts: int
    few_targets: bool = False


class Head(Protocol):
    """A head with its parameters: turns features into a distribution."""

    def logits(self, features_xD: jax.Array) -> jax.Array:
        """…×V float32."""
        ...

    def loss(self, inputs: HeadInputs, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Losses:
        """Weighted sum of −log p(target), nats, with its penalties; see `cross_entropy` for the arguments."""
        ...

    def scores(self, inputs: HeadInputs) -> dict[str, jax.Array]:
        """Scores per target, B×L: "nll", nats, and perhaps "hits", 1 if it is the likeliest token.

        More axes may follow. Values where the weight is 0 have no meaning.
        """
        ...


@dataclasses.dataclass(frozen=True)
class HeadKind:
    """A row of the table of heads.

    Attributes:
        bind: function (model) -> its head.
        outputs: function (model config) -> number of outputs per token.
        parameters: function (model config, rngs) -> the head's parameters by their names in the model.
        sections: its sections of keys in `config.model`.
        of_values: whether it predicts the 256 values of a byte, which are the last words of the vocabulary.
        pool: function (model config, features B×L×D, mask of tokens that are not padding B×L) -> B×D, for a head that
            predicts once per sequence; None: the head predicts at each token.
    """

    bind: Callable[[Any], Head]
    outputs: Callable[[ModelConfig], int] = lambda config: config.vocab_size
    parameters: Callable[[ModelConfig, nnx.Rngs], Mapping[str, nnx.Module | nnx.Param]] = lambda config, rngs: {}
    sections: tuple[type, ...] = ()
    of_values: bool = False
    pool: Callable[[ModelConfig, jax.Array, jax.Array], jax.Array] | None = None


def register_head(name: str, row: HeadKind) -> None:
    """Registers a head, for `model.head`; a task may name it as its default."""
    HEADS.register(name, row)


@section("model.softmax")
class SoftmaxOptions:
    """Options of model.head=softmax."""

    cap: float = key(0.0, "logits are cap · tanh(logits / cap); 0 = off", at_least(0))


@section("model.logistics")
class LogisticsOptions:
    """Options of model.head=logistics."""

    mixtures: int = key(10, "logistics", at_least(1))


def weighted_sum(x_BxL: jax.Array, weights_BxL: jax.Array) -> jax.Array:
    """Σ weight · x over the targets; x may be anything, even NaN, where the weight is 0.

    >>> float(weighted_sum(jnp.array([[1.0, jnp.nan, 2.0]]), jnp.array([[1.0, 0.0, 0.5]])))
    2.0
    """
    return jnp.where(weights_BxL > 0, x_BxL * weights_BxL, 0).sum()


class SoftmaxHead(NamedTuple):
    """softmax(features · tableᵀ), whose logits may be kept within ± cap ("Gemma 2", arXiv:2408.00118, section 2)."""

    table_VxD: jax.Array
    cap: float = 0.0

    def logits(self, features_xD: jax.Array) -> jax.Array:
        """…×V float32."""
        table_VxD = self.table_VxD.astype(features_xD.dtype)
        logits_xV = jnp.einsum("...d,vd->...v", features_xD, table_VxD, preferred_element_type=jnp.float32)
        return soft_capped(logits_xV, self.cap)

    def loss(self, inputs: HeadInputs, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Losses:
        """See `Head`."""
        # Computed in chunks: the logits of a full batch would not fit into memory.
        features_BxLxD, targets_BxL, weights_BxL, chunk, parts, few_targets = inputs
        options = chunk, parts, z_loss, self.cap, label_smoothing, few_targets
        result: Any = cross_entropy(features_BxLxD, self.table_VxD, targets_BxL, weights_BxL, *options)
        total, penalties = result
        factors = {"z_loss": z_loss, "label_smoothing": label_smoothing}
        return total, {name: penalty for (name, x), penalty in zip(factors.items(), penalties, strict=True) if x}

    def scores(self, inputs: HeadInputs) -> dict[str, jax.Array]:
        """See `Head`."""
        features_BxLxD, targets_BxL, weights_BxL, chunk, parts, few_targets = inputs
        options = chunk, parts, self.cap, few_targets
        nll_BxL, hits_BxL = token_scores(features_BxLxD, self.table_VxD, targets_BxL, weights_BxL, *options)
        return {"nll": nll_BxL, "hits": hits_BxL}


class LogisticsHead(NamedTuple):
    """A mixture of discretised logistics over the last 256 words of the vocabulary; it never predicts the others.

    The components start spread over the values. Means and scales have a tenth of the learning rate of the weights: far
    from a value, the gradient of a log-scale is the distance in scales, and that of a mean is one over the scale, so at
    the same rate they would dominate, and a narrow component would overshoot.
    """

    kernel_Dx3P: jax.Array
    vocab_size: int

    def logits(self, features_xD: jax.Array) -> jax.Array:
        """…×V float32: log-probabilities, −∞ for the words before the values."""
        # The distribution over the 256 values, after the words that the head never predicts.
        parameters_x1x3P = self._parameters(features_xD)[..., None, :]
        log_probs_xN = mixture_log_probs(parameters_x1x3P, jnp.arange(VALUES, dtype=jnp.int32))
        before = [(0, 0)] * (log_probs_xN.ndim - 1) + [(self.vocab_size - VALUES, 0)]
        return jnp.pad(log_probs_xN, before, constant_values=-jnp.inf)

    def loss(self, inputs: HeadInputs, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Losses:
        """See `Head`; without penalties. The outputs per token are few, so nothing is computed in chunks."""
        del z_loss, label_smoothing
        return weighted_sum(self.scores(inputs)["nll"], inputs.weights_BxL), {}

    def scores(self, inputs: HeadInputs) -> dict[str, jax.Array]:
        """Only "nll": accuracy over 256 values says little."""
        values_BxL = inputs.targets_BxL - (self.vocab_size - VALUES)
        return {"nll": -mixture_log_probs(self._parameters(inputs.features_BxLxD), values_BxL)}

    def _parameters(self, features_xD: jax.Array) -> jax.Array:
        """Logits of the weights, means and log-scales of the P components, …×3P float32."""
        kernel_Dx3P = self.kernel_Dx3P.astype(features_xD.dtype)
        parameters_x3P = jnp.matmul(features_xD, kernel_Dx3P, preferred_element_type=jnp.float32)
        weights_xP, means_xP, log_scales_xP = jnp.split(parameters_x3P, 3, axis=-1)
        # Means start evenly spread over −1 … 1, which are the values 0 … 255; see the class for the factors.
        starts_xP = jnp.broadcast_to(jnp.linspace(-1, 1, means_xP.shape[-1]), means_xP.shape)
        means_xP = starts_xP + _PACE * means_xP
        return jnp.concatenate([weights_xP, means_xP, _LOG_SCALE + _PACE * log_scales_xP], axis=-1)


def _output_embedding(config: ModelConfig, rngs: nnx.Rngs) -> dict[str, nnx.Param]:
    if config.tie_embeddings:
        return {}
    shape = (config.vocab_size, config.model_dim)
    init = EMBEDDING_INITS[config.init]
    return {"output_embedding": nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))}


def _softmax(model: Any) -> SoftmaxHead:
    table = model.embedding if model.config.tie_embeddings else model.output_embedding
    return SoftmaxHead(table[...], model.config[SoftmaxOptions].cap)


def _numbers(config: ModelConfig) -> int:
    return 3 * config[LogisticsOptions].mixtures  # a weight, a mean and a scale each


def _mixture(config: ModelConfig, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
    return {"mixture": Dense(config.model_dim, _numbers(config), config, rngs=rngs, biased=NEVER)}


def _logistics(model: Any) -> LogisticsHead:
    return LogisticsHead(model.mixture.kernel[...], model.config.vocab_size)


register_head("softmax", HeadKind(_softmax, parameters=_output_embedding, sections=(SoftmaxOptions,)))
register_head("logistics", HeadKind(_logistics, _numbers, _mixture, (LogisticsOptions,), of_values=True))
