"""From features to a distribution over the vocabulary: a word's logit each, or a few logistics over ordered values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.cross_entropy import cross_entropy, cross_entropy_and_hits
from flash_lm.ops.logistics import VALUES, mixture_log_probs


class SoftmaxHead(NamedTuple):
    """softmax(features · tableᵀ)."""

    table_VxD: jax.Array

    def logits(self, features_xD: jax.Array) -> jax.Array:
        """…×V float32."""
        table_VxD = self.table_VxD.astype(features_xD.dtype)
        return jnp.einsum("...d,vd->...v", features_xD, table_VxD, preferred_element_type=jnp.float32)

    def nll(self, features_BxLxD, targets_BxL, weights_BxL, chunk: int, parts: int) -> jax.Array:
        """Weighted sum of −log p(target), nats; see `cross_entropy` for the arguments."""
        return cross_entropy(features_BxLxD, self.table_VxD, targets_BxL, weights_BxL, chunk, parts)

    def scores(self, features_BxLxD, targets_BxL, weights_BxL, chunk: int, parts: int) -> dict[str, jax.Array]:
        """The same sum as "nll", and "hits": the targets that are the likeliest token."""
        found = cross_entropy_and_hits(features_BxLxD, self.table_VxD, targets_BxL, weights_BxL, chunk, parts)
        return dict(zip(("nll", "hits"), found, strict=True))


class LogisticsHead(NamedTuple):
    """A mixture of discretised logistics over the last 256 words of the vocabulary; the others never come."""

    kernel_Dx3P: jax.Array
    vocab_size: int

    def logits(self, features_xD: jax.Array) -> jax.Array:
        """…×V float32: log-probabilities, −∞ of the words before the values."""
        parameters_x1x3P = self._parameters(features_xD)[..., None, :]
        log_probs_xN = mixture_log_probs(parameters_x1x3P, jnp.arange(VALUES, dtype=jnp.int32))
        before = [(0, 0)] * (log_probs_xN.ndim - 1) + [(self.vocab_size - VALUES, 0)]
        return jnp.pad(log_probs_xN, before, constant_values=-jnp.inf)

    def nll(self, features_BxLxD, targets_BxL, weights_BxL, chunk: int, parts: int) -> jax.Array:
        """As `SoftmaxHead.nll`; there is no large array to cut into chunks or parts."""
        del chunk, parts
        values_BxL = targets_BxL - (self.vocab_size - VALUES)
        log_probs_BxL = mixture_log_probs(self._parameters(features_BxLxD), values_BxL)
        return -jnp.where(weights_BxL > 0, log_probs_BxL * weights_BxL, 0).sum()

    def scores(self, features_BxLxD, targets_BxL, weights_BxL, chunk: int, parts: int) -> dict[str, jax.Array]:
        """The same sum as "nll" alone: that a value is the likeliest of 256 says little."""
        return {"nll": self.nll(features_BxLxD, targets_BxL, weights_BxL, chunk, parts)}

    def _parameters(self, features_xD: jax.Array) -> jax.Array:
        return jnp.matmul(features_xD, self.kernel_Dx3P.astype(features_xD.dtype), preferred_element_type=jnp.float32)


Head = SoftmaxHead | LogisticsHead
