"""From features to a distribution over the vocabulary: a word's logit each, or a few logistics over ordered values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.cross_entropy import cross_entropy, cross_entropy_and_hits
from flash_lm.ops.logistics import VALUES, mixture_log_probs
from flash_lm.schema import at_least, key, section

_PACE, _LOG_SCALE = 0.1, -3.0  # of the logistics' means and scales, and where the scales start


@section("model.logistics")
class LogisticsOptions:
    """Of model.head=logistics."""

    mixtures: int = key(10, "logistics", at_least(1), before=10)


class SoftmaxHead(NamedTuple):
    """softmax(features · tableᵀ)."""

    table_VxD: jax.Array

    def logits(self, features_xD: jax.Array) -> jax.Array:
        """…×V float32."""
        table_VxD = self.table_VxD.astype(features_xD.dtype)
        return jnp.einsum("...d,vd->...v", features_xD, table_VxD, preferred_element_type=jnp.float32)

    def loss(
        self, features_BxLxD, targets_BxL, weights_BxL, chunk: int, parts: int, z_loss: float = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        """Weighted sum of −log p(target), nats, and the z-loss in it; see `cross_entropy` for the arguments."""
        return cross_entropy(features_BxLxD, self.table_VxD, targets_BxL, weights_BxL, chunk, parts, z_loss)

    def scores(self, features_BxLxD, targets_BxL, weights_BxL, chunk: int, parts: int) -> dict[str, jax.Array]:
        """The same sum as "nll", and "hits": the targets that are the likeliest token."""
        found = cross_entropy_and_hits(features_BxLxD, self.table_VxD, targets_BxL, weights_BxL, chunk, parts)
        return dict(zip(("nll", "hits"), found, strict=True))


class LogisticsHead(NamedTuple):
    """A mixture of discretised logistics over the last 256 words of the vocabulary; the others never come.

    The components start spread over the values, and a step of Adam moves their means and scales a tenth as far as their
    weights. Far from a value the gradient of a log-scale is the distance in scales, and that of a mean one over the
    scale: at the same pace they drown those of the weights, and a narrow component jumps past its value.
    """

    kernel_Dx3P: jax.Array
    vocab_size: int

    def logits(self, features_xD: jax.Array) -> jax.Array:
        """…×V float32: log-probabilities, −∞ of the words before the values."""
        parameters_x1x3P = self._parameters(features_xD)[..., None, :]
        log_probs_xN = mixture_log_probs(parameters_x1x3P, jnp.arange(VALUES, dtype=jnp.int32))
        before = [(0, 0)] * (log_probs_xN.ndim - 1) + [(self.vocab_size - VALUES, 0)]
        return jnp.pad(log_probs_xN, before, constant_values=-jnp.inf)

    def loss(
        self, features_BxLxD, targets_BxL, weights_BxL, chunk: int, parts: int, z_loss: float = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        """As `SoftmaxHead.loss`, without a Z; there is no large array to cut into chunks or parts."""
        del chunk, parts, z_loss
        values_BxL = targets_BxL - (self.vocab_size - VALUES)
        log_probs_BxL = mixture_log_probs(self._parameters(features_BxLxD), values_BxL)
        return -jnp.where(weights_BxL > 0, log_probs_BxL * weights_BxL, 0).sum(), jnp.zeros((), jnp.float32)

    def scores(self, features_BxLxD, targets_BxL, weights_BxL, chunk: int, parts: int) -> dict[str, jax.Array]:
        """The same sum as "nll" alone: that a value is the likeliest of 256 says little."""
        return {"nll": self.loss(features_BxLxD, targets_BxL, weights_BxL, chunk, parts)[0]}

    def _parameters(self, features_xD: jax.Array) -> jax.Array:
        kernel_Dx3P = self.kernel_Dx3P.astype(features_xD.dtype)
        found_x3P = jnp.matmul(features_xD, kernel_Dx3P, preferred_element_type=jnp.float32)
        weights_xP, means_xP, log_scales_xP = jnp.split(found_x3P, 3, axis=-1)
        starts_xP = jnp.broadcast_to(jnp.linspace(-1, 1, means_xP.shape[-1]), means_xP.shape)
        means_xP = starts_xP + _PACE * means_xP
        return jnp.concatenate([weights_xP, means_xP, _LOG_SCALE + _PACE * log_scales_xP], axis=-1)


Head = SoftmaxHead | LogisticsHead
