"""Linformer: softmax attention with keys and values projected along the length to R slots ("Linformer", eq. 7)."""

import jax
import jax.numpy as jnp

from flash_lm.ops.matmul import matmul


def attend_to_slots(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    key_slots_LxR: jax.Array,
    value_slots_LxR: jax.Array,
    real_BxL: jax.Array,
) -> jax.Array:
    """Linformer: softmax(q (E k)ᵀ / √K) F v, with time and memory O(L · R).

    Args:
        q_BxHxLxK: queries.
        k_BxHxLxK: keys.
        v_BxHxLxE: values.
        key_slots_LxR: Eᵀ, weight of the token at each position in the key of each of R slots.
        value_slots_LxR: Fᵀ, the same for values.
        real_BxL: which tokens are not padding, (B or 1)×L; padding is in no slot.

    Returns:
        B×H×L×E, dtype of v; meaningless at padding.
    """
    key_BxHxRxK = _project_slots(k_BxHxLxK, key_slots_LxR, real_BxL)
    value_BxHxRxE = _project_slots(v_BxHxLxE, value_slots_LxR, real_BxL)
    scores_BxHxLxR = matmul(q_BxHxLxK, key_BxHxRxK, transpose_b=True) * q_BxHxLxK.shape[-1] ** -0.5
    weights_BxHxLxR = jax.nn.softmax(scores_BxHxLxR, axis=-1)
    return matmul(weights_BxHxLxR.astype(v_BxHxLxE.dtype), value_BxHxRxE).astype(v_BxHxLxE.dtype)


def _project_slots(x_BxHxLxK: jax.Array, slots_LxR: jax.Array, real_BxL: jax.Array) -> jax.Array:
    """Σ_l slots_lr x_l over the real tokens, B×H×R×K, dtype of x."""
    # Unlike a product with zero, this gives zero for any padding, even NaN.
    x_BxHxLxK = jnp.where(real_BxL[:, None, :, None], x_BxHxLxK, 0)
    batch, heads, length, width = x_BxHxLxK.shape
    # All sequences and heads share the slots: one product of two matrices, and so is the gradient of the slots.
    x_LxN = jnp.moveaxis(x_BxHxLxK, 2, 0).reshape(length, -1)
    mixed_RxN = matmul(slots_LxR.astype(x_LxN.dtype), x_LxN, transpose_a=True).astype(x_LxN.dtype)
    return jnp.moveaxis(mixed_RxN.reshape(-1, batch, heads, width), 0, 2)
