"""Soft mask of learned attention spans, m_z(x) = clamp((R + z − x) / R, 0, 1) ("Adaptive Attention Span", eq. 3)."""

import jax
import jax.numpy as jnp

from flash_lm.ops.blocked_attention import HIDDEN


def log_mask(span_H: jax.Array, distance: jax.Array, ramp: int) -> jax.Array:
    """Log m_z, as a bias of the scores: softmax(s + log m) = m e^s / Σ m e^s.

    m_z(x) = clamp((R + z − x) / R, 0, 1): one up to the span z, then falling to zero over R tokens.

    Args:
        span_H: z of each head, tokens.
        distance: index of the key minus index of the query, int32, any shape.
        ramp: R, tokens.

    Returns:
        float32, H in front of the shape of `distance`; −1e30 where a key is hidden.
    """
    span = span_H.astype(jnp.float32).reshape(-1, *[1] * distance.ndim)
    mask = (ramp + span - jnp.abs(distance).astype(jnp.float32)[None]) / ramp
    hidden = mask <= 0
    # Its derivative, 1 / (R m), meets a weight that is proportional to m; at m = 0 it would be infinite.
    return jnp.where(hidden, HIDDEN, jnp.log(jnp.clip(jnp.where(hidden, 1, mask), None, 1)))


def reach(span_H: jax.Array, ramp: int) -> jax.Array:
    """Tokens that the head with the largest span sees in one direction, itself included, int32: those with m > 0."""
    return jnp.ceil(ramp + span_H.astype(jnp.float32).max()).astype(jnp.int32)
