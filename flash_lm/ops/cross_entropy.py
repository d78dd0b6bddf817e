"""Cross entropy over a large vocabulary, a slice of the tokens at a time.

Logits exist for one slice only. Under differentiation the forward pass makes the gradients on the way, since it has the
slice's softmax at hand: three products instead of the four of a recomputing backward pass, and no B×L×V array.
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
        """B×L×… -> G×N×…; one dimension of tokens, since XLA's CPU backend is slow to sum a product over two."""
        padded = jnp.pad(x_BxLx, [(0, 0), (0, -length % size)] + [(0, 0)] * (x_BxLx.ndim - 2))
        split = jnp.moveaxis(padded.reshape(batch, -1, size, *x_BxLx.shape[2:]), 1, 0)
        return split.reshape(split.shape[0], batch * size, *x_BxLx.shape[2:])

    def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    def body(carry, part):
        total, d_table_VxD = carry
        x_NxD, targets_N, weights_N = part
        logits_NxV = product("nd,vd->nv", x_NxD, table)
        top_Nx1 = logits_NxV.max(axis=-1, keepdims=True)
        exponentials_NxV = jnp.exp(logits_NxV - top_Nx1)
        denominator_Nx1 = exponentials_NxV.sum(axis=-1, keepdims=True)
        target_logit_N = jnp.take_along_axis(logits_NxV, targets_N[:, None], axis=-1)[:, 0]
        nll_N = jnp.log(denominator_Nx1[:, 0]) + top_Nx1[:, 0] - target_logit_N
        total += jnp.where(weights_N > 0, nll_N * weights_N, 0).sum()
        if not with_gradients:
            return (total, d_table_VxD), None
        is_target_NxV = jnp.arange(table.shape[0], dtype=jnp.int32)[None] == targets_N[:, None]
        d_logits_NxV = exponentials_NxV / denominator_Nx1 - is_target_NxV.astype(jnp.float32)
        d_logits_NxV = (d_logits_NxV * weights_N[:, None]).astype(table.dtype)
        d_table_VxD += product("nv,nd->vd", d_logits_NxV, x_NxD)
        return (total, d_table_VxD), product("nv,vd->nd", d_logits_NxV, table).astype(x_NxD.dtype)

    parts = tuple(slices(x) for x in (features_BxLxD, targets_BxL, weights_BxL.astype(jnp.float32)))
    d_table = jnp.zeros(table_VxD.shape, jnp.float32) if with_gradients else None
    (total, d_table_VxD), d_features_GxNxD = jax.lax.scan(body, (jnp.zeros((), jnp.float32), d_table), parts)
    if d_features_GxNxD is None or d_table_VxD is None:
        return total, None
    d_features_BxGxCxD = jnp.moveaxis(d_features_GxNxD.reshape(-1, batch, size, width), 0, 1)
    d_features_BxLxD = d_features_BxGxCxD.reshape(batch, -1, width)[:, :length]
    return total, (d_features_BxLxD, d_table_VxD.astype(table_VxD.dtype))
