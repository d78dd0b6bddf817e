"""Position encodings: rotary (RoPE), sinusoid, T5 buckets, Toeplitz matrices. All tables are float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np

_BASE = 10000.0


def _angles(positions_BxL: jax.Array, width: int, base: float) -> jax.Array:
    """Position · base^(−2i/width) for i < width/2: B×L×(width/2) float32."""
    frequencies = (base ** (-np.arange(0, width, 2, dtype=np.float64) / width)).astype(np.float32)
    return positions_BxL[..., None].astype(jnp.float32) * frequencies.reshape(*[1] * positions_BxL.ndim, -1)


def rotary_table(positions_BxL: jax.Array, width: int, base: float = _BASE) -> tuple[jax.Array, jax.Array]:
    """Cosines and signed sines for `rotate`, each B×L×width ("RoFormer", section 3.2.2)."""
    angles = _angles(positions_BxL, width, base)
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cosines, cosines], axis=-1), jnp.concatenate([-sines, sines], axis=-1)


def rotate(x_BxHxLxK: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates dimension i with dimension i + K/2 (half-split form) by the table's angle, in float32."""
    cosines, signed_sines = (t[:, None] for t in table)
    x = x_BxHxLxK.astype(jnp.float32)
    # Over full vectors: XLA's CPU backend turns two joined halves into a loop that it cannot vectorise.
    return (x * cosines + jnp.roll(x, x.shape[-1] // 2, axis=-1) * signed_sines).astype(x_BxHxLxK.dtype)


def sinusoid(positions_BxL: jax.Array, width: int) -> jax.Array:
    """Sines in the first half, cosines in the second: B×L×width float32 ("Attention Is All You Need", 3.5)."""
    angles = _angles(positions_BxL, width, _BASE)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def t5_bucket(distance: jax.Array, *, causal: bool, buckets: int, max_distance: int) -> jax.Array:
    """T5's bucket of a key's distance from its query ("Exploring the Limits of Transfer Learning", section 2.1).

    Half of a direction's buckets hold one distance each, the other half grow logarithmically up to `max_distance`.

    Args:
        distance: index of the key minus index of the query, int32.
        causal: all buckets look back; otherwise half of them look ahead.
        buckets: number of buckets.
        max_distance: all distances from here on share the last bucket.

    Returns:
        0 … buckets − 1, int32.
    """
    ahead = 0
    if causal:
        back = jnp.maximum(-distance, 0)
    else:
        buckets //= 2
        ahead = jnp.where(distance > 0, buckets, 0)
        back = jnp.abs(distance)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(back, exact).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    logarithmic = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    return ahead + jnp.where(back < exact, back, jnp.minimum(logarithmic, buckets - 1))


def toeplitz(values_xW: jax.Array) -> jax.Array:
    """A square matrix from the values of its diagonals, for the distances −(C−1) … C−1 from row to column.

    It repeats and cuts the values, since the derivative of a lookup would add single numbers one by one.

    Args:
        values_xW: (..., 2C − 1).

    Returns:
        (..., C, C).
    """
    *leading, width = values_xW.shape
    size = (width + 1) // 2
    below, above = values_xW[..., : size - 1], values_xW[..., size - 1 :]
    # One column more than diagonals, so that each row starts one column further left than the one above.
    period = jnp.concatenate([above, jnp.zeros((*leading, 1), values_xW.dtype), below], axis=-1)
    repeated = jnp.tile(period, size)[..., : size * width]
    return repeated.reshape(*leading, size, width)[..., :size]


def skew(x_xCxW: jax.Array, width: int) -> jax.Array:
    """Relative shift: moves row i by C − i columns to the left, (…, C, W) -> (…, C, width), W = C + width.

    Scores by distance become scores by key, as in Transformer-XL, by reshaping alone.
    """
    *leading, size, wide = x_xCxW.shape
    flat = x_xCxW.reshape(*leading, size * wide)[..., size:]
    return flat.reshape(*leading, size, wide - 1)[..., :width]
