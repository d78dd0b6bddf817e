"""Cross entropy over a large vocabulary, a slice of the tokens at a time.

Logits exist for one slice only. Under differentiation the forward pass makes the gradients on the way, since the slice's
softmax is at hand then: three products instead of the four of a recomputing backward pass, and no B×L×V array.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    features_BxLxD: jax.Array, table_VxD: jax.Array, targets_BxL: jax.Array, weights_BxL: jax.Array, chunk: int
) -> jax.Array:
    """Weighted sum over tokens of −log softmax(features · tableᵀ)[target].

    Args:
        features_BxLxD: in the computation's dtype.
        table_VxD: the unembedding.
        targets_BxL: token ids, int32.
        weights_BxL: float32; 0 leaves a token out. No gradient flows into it.
        chunk: tokens whose logits exist at the same time.

    Returns:
        The sum in nats, a float32 scalar.
    """
    return _scan(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, with_gradients=False)[0]


def _forward(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk):
    total, gradients = _scan(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, with_gradients=True)
    return total, gradients


def _backward(chunk, gradients, cotangent):
    d_features_BxLxD, d_table_VxD = (g * cotangent.astype(g.dtype) for g in gradients)
    return d_features_BxLxD, d_table_VxD, None, None


cross_entropy.defvjp(_forward, _backward)


def _scan(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk: int, *, with_gradients: bool):
    """The sum, and the gradients by features and table or None."""
    batch, length, width = features_BxLxD.shape
    # Slices run along L, so that a batch sharded over devices stays where it is.
    size = min(max(chunk // batch, 1), length)
    table = table_VxD.astype(features_BxLxD.dtype)

    def slices(x_BxLx: jax.Array) -> jax.Array:
        padded = jnp.pad(x_BxLx, [(0, 0), (0, -length % size)] + [(0, 0)] * (x_BxLx.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, -1, size, *x_BxLx.shape[2:]), 1, 0)

    def body(carry, part):
        total, d_table_VxD = carry
        x_BxCxD, targets_BxC, weights_BxC = part
        logits_BxCxV = jnp.einsum("bcd,vd->bcv", x_BxCxD, table, preferred_element_type=jnp.float32)
        top_BxCx1 = logits_BxCxV.max(axis=-1, keepdims=True)
        exponentials_BxCxV = jnp.exp(logits_BxCxV - top_BxCx1)
        denominator_BxCx1 = exponentials_BxCxV.sum(axis=-1, keepdims=True)
        target_logit_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)[..., 0]
        nll_BxC = jnp.log(denominator_BxCx1[..., 0]) + top_BxCx1[..., 0] - target_logit_BxC
        total += jnp.where(weights_BxC > 0, nll_BxC * weights_BxC, 0).sum()
        if not with_gradients:
            return (total, d_table_VxD), None
        is_target_BxCxV = jnp.arange(table.shape[0], dtype=jnp.int32)[None, None] == targets_BxC[..., None]
        d_logits_BxCxV = exponentials_BxCxV / denominator_BxCx1 - is_target_BxCxV.astype(jnp.float32)
        d_logits_BxCxV = (d_logits_BxCxV * weights_BxC[..., None]).astype(table.dtype)
        d_x_BxCxD = jnp.einsum("bcv,vd->bcd", d_logits_BxCxV, table, preferred_element_type=jnp.float32)
        d_table_VxD += jnp.einsum("bcv,bcd->vd", d_logits_BxCxV, x_BxCxD, preferred_element_type=jnp.float32)
        return (total, d_table_VxD), d_x_BxCxD.astype(x_BxCxD.dtype)

    parts = tuple(slices(x) for x in (features_BxLxD, targets_BxL, weights_BxL.astype(jnp.float32)))
    d_table = jnp.zeros(table_VxD.shape, jnp.float32) if with_gradients else None
    (total, d_table_VxD), d_features_GxBxCxD = jax.lax.scan(body, (jnp.zeros((), jnp.float32), d_table), parts)
    if not with_gradients:
        return total, None
    d_features_BxLxD = jnp.moveaxis(d_features_GxBxCxD, 0, 1).reshape(batch, -1, width)[:, :length]
    return total, (d_features_BxLxD, d_table_VxD.astype(table_VxD.dtype))
