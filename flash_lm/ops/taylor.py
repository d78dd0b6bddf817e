"""Second-order Taylor features of e^s, φ(q)·φ(k) = 1 + s + s²/2 (Based, Arora et al. 2024, section 4.1)."""

import jax
import jax.numpy as jnp
import numpy as np


def taylor_features(x_xK: jax.Array) -> jax.Array:
    """Features φ with φ(q)·φ(k) = 1 + s + s²/2 for s = q·k / √K, which is at least ½.

    Args:
        x_xK: queries or keys, (…, K).

    Returns:
        (…, `taylor_width(K)`) float32: one, the numbers, and the product of each two of them once.
    """
    width = x_xK.shape[-1]
    x = x_xK.astype(jnp.float32) / width**0.25
    # Chosen by products with ones: the derivative of a gather is slow.
    chosen = lambda weights: jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST)
    first, second = (jnp.asarray(y) for y in _pairs(width))
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x, chosen(first) * chosen(second)], axis=-1)


def taylor_width(width: int) -> int:
    """Number of features of vectors of this width."""
    return 1 + width + width * (width + 1) // 2


def _pairs(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Selections of both factors of each pair of channels, K×K(K+1)/2; a square counts 1/√2."""
    rows, columns = np.triu_indices(width)
    ones = np.eye(width, dtype=np.float32)
    return ones[:, rows] * np.where(rows == columns, np.sqrt(0.5), 1).astype(np.float32), ones[:, columns]
