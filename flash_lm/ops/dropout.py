"""Dropout ("Dropout", Srivastava et al. 2014)."""

import jax
import jax.numpy as jnp


def drop(x_BxLxD: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a share `rate` of the entries and scales the others up; the identity without a key."""
    if key is None or rate == 0:
        return x_BxLxD
    kept = jax.random.bernoulli(key, 1 - rate, x_BxLxD.shape)
    return jnp.where(kept, x_BxLxD / (1 - rate), 0).astype(x_BxLxD.dtype)
