"""Cosine re-weighting features of cosFormer (Qin et al. 2022, eq. 9–12)."""

import jax
import jax.numpy as jnp


def cosine_features(x_BxHxLxK: jax.Array, positions_BxL: jax.Array, length: int) -> jax.Array:
    """Features whose products are relu(q)·relu(k) cos(π (i − j) / 2M), by cos(a − b) = cos a cos b + sin a sin b.

    At positions 0 … M − 1 no feature is negative, so sums of products do not cancel.

    Args:
        x_BxHxLxK: queries or keys.
        positions_BxL: their positions i or j in the document, (B or 1)×L.
        length: M, where the cosine reaches zero.

    Returns:
        B×H×L×2K float32.
    """
    angles_Bx1xLx1 = (jnp.pi / 2 / length * positions_BxL.astype(jnp.float32))[:, None, :, None]
    x = jnp.maximum(x_BxHxLxK.astype(jnp.float32), 0)
    return jnp.concatenate([x * jnp.cos(angles_Bx1xLx1), x * jnp.sin(angles_Bx1xLx1)], axis=-1)
