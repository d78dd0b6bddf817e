"""Mixtures of discretised logistics over the 256 values of a byte ("PixelCNN++", section 2.1).

A value v stands for x = v / 127.5 − 1 and has the mass of a logistic distribution in (x − 1/255, x + 1/255); the first
and the last value also have all the mass below and above.
"""

import jax
import jax.numpy as jnp

VALUES = 256
_LEAST_LOG_SCALE = -7.0  # narrower than a value's bin


def mixture_log_probs(parameters_x3P: jax.Array, values_x: jax.Array) -> jax.Array:
    """Log Σ_p π_p p(v | μ_p, s_p).

    Args:
        parameters_x3P: logits of π, means μ and log s of P components, in this order, …×3P.
        values_x: v, …, integers from 0 to 255, to be broadcast.

    Returns:
        …, float32, the broadcast shape of the two.
    """
    values_x = jnp.broadcast_to(values_x, jnp.broadcast_shapes(parameters_x3P.shape[:-1], values_x.shape))
    logits_xP, means_xP, log_scales_xP = jnp.split(parameters_x3P.astype(jnp.float32), 3, axis=-1)
    log_scales_xP = jnp.maximum(log_scales_xP, _LEAST_LOG_SCALE)
    centred_xP = values_x[..., None].astype(jnp.float32) / 127.5 - 1 - means_xP
    upper_xP, lower_xP = ((centred_xP + side / 255) * jnp.exp(-log_scales_xP) for side in (1, -1))
    # σ(a) − σ(b) = σ(a) σ(−b) (1 − e^(b−a)): avoids the difference of two nearly equal numbers.
    inside_xP = jnp.log(-jnp.expm1(-2 / 255 * jnp.exp(-log_scales_xP)))
    is_first_xx1, is_last_xx1 = (values_x == 0)[..., None], (values_x == VALUES - 1)[..., None]
    log_prob_xP = (
        jnp.where(is_last_xx1, 0, jax.nn.log_sigmoid(upper_xP))
        + jnp.where(is_first_xx1, 0, jax.nn.log_sigmoid(-lower_xP))
        + jnp.where(is_first_xx1 | is_last_xx1, 0, inside_xP)
    )
    return jax.nn.logsumexp(jax.nn.log_softmax(logits_xP) + log_prob_xP, axis=-1)
