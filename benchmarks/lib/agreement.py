"""How far an implementation is from the form in float32 at its highest precision, and how far it may be."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

# Relative distance by dtype; float32 products are in TF32 on a GPU.
AGREES: Mapping[str, float] = {"bfloat16": 2e-2, "float32": 2e-3}
_LEAST_SHARE = 0.1  # of the mean norm of heads: what a head without keys, whose norm is 0, is divided by


def distance(actual: jax.Array, expected: jax.Array) -> float:
    """Returns the relative distance of two arrays."""
    difference = jnp.linalg.norm(actual.astype(jnp.float32) - expected)
    # Sequences of one chunk have no attention across chunks, and no gradient for it.
    return float(difference / jnp.maximum(jnp.linalg.norm(expected), jnp.finfo(jnp.float32).tiny))


@jax.jit
def worst_head(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the largest relative distance of a head of a sequence, arrays B×H×L×E; NaN if one has a NaN."""
    norms_BxH = jnp.linalg.norm(expected, axis=(2, 3))
    difference_BxH = jnp.linalg.norm(actual.astype(jnp.float32) - expected, axis=(2, 3))
    return (difference_BxH / jnp.maximum(norms_BxH, _LEAST_SHARE * norms_BxH.mean())).max()
