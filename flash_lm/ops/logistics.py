"""Mixtures of discretised logistics over the 256 values of a byte ("PixelCNN++", section 2.1).

A value v stands for x = v / 127.5 − 1 and has the mass of a logistic distribution in (x − 1/255, x + 1/255), the first
and the last value also that of all below and above.
"""

import jax
import jax.numpy as jnp

VALUES = 256
_LEAST_LOG_SCALE = -7.0  # narrower than a value's bin


def mixture_log_probs(parameters_x3M: jax.Array, values_x: jax.Array) -> jax.Array:
    """Log Σ_m π_m P(v | μ_m, s_m).

    Args:
        parameters_x3M: logits of π, means μ and log s of M components, in this order, …×3M.
        values_x: v, …, whole numbers from 0 to 255; they are broadcast.

    Returns:
        …, float32, as the two broadcast.
    """
    values_x = jnp.broadcast_to(values_x, jnp.broadcast_shapes(parameters_x3M.shape[:-1], values_x.shape))
    logits_xM, means_xM, log_scales_xM = jnp.split(parameters_x3M.astype(jnp.float32), 3, axis=-1)
    log_scales_xM = jnp.maximum(log_scales_xM, _LEAST_LOG_SCALE)
    centred_xM = values_x[..., None].astype(jnp.float32) / 127.5 - 1 - means_xM
    upper_xM, lower_xM = ((centred_xM + side / 255) * jnp.exp(-log_scales_xM) for side in (1, -1))
    # σ(a) − σ(b) = σ(a) σ(−b) (1 − e^(b−a)): no difference of two numbers that are nearly the same.
    inside_xM = jnp.log(-jnp.expm1(-2 / 255 * jnp.exp(-log_scales_xM)))
    is_first_xx1, is_last_xx1 = (values_x == 0)[..., None], (values_x == VALUES - 1)[..., None]
    log_prob_xM = (
        jnp.where(is_last_xx1, 0, jax.nn.log_sigmoid(upper_xM))
        + jnp.where(is_first_xx1, 0, jax.nn.log_sigmoid(-lower_xM))
        + jnp.where(is_first_xx1 | is_last_xx1, 0, inside_xM)
    )
    return jax.nn.logsumexp(jax.nn.log_softmax(logits_xM) + log_prob_xM, axis=-1)
