"""Cross entropy over a large vocabulary, a slice of the tokens at a time.

Logits exist for one slice only. Under differentiation the forward pass makes the gradients on the way, since it has the
slice's softmax at hand: three products instead of the four of a recomputing backward pass, and no B×L×V array.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    features_BxLxD: jax.Array,
    table_VxD: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    chunk: int,
    parts: int = 1,
) -> jax.Array:
    """Weighted sum over tokens of −log softmax(features · tableᵀ)[target].

    Args:
        features_BxLxD: in the computation's dtype.
        table_VxD: the unembedding.
        targets_BxL: token ids, int32.
        weights_BxL: float32; 0 leaves a token out. No gradient flows into it.
        chunk: tokens of a part whose logits exist at the same time.
        parts: into how many parts the batch is cut, such as the devices that it lies on. Each sums the gradient by the
            table for itself, so that devices exchange it once and not for every slice; B is a multiple of it.

    Returns:
        The sum in nats, a float32 scalar.
    """
    return _scan(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts, with_gradients=False)[0]


def cross_entropy_and_hits(
    features_BxLxD: jax.Array,
    table_VxD: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    chunk: int,
    parts: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """As `cross_entropy`, which is to be differentiated, and the weighted number of targets with the largest logit."""
    total, hits, _ = _scan(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts, with_gradients=False)
    return total, hits


def _forward(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts):
    total, _, gradients = _scan(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts, with_gradients=True)
    return total, gradients


def _backward(chunk, parts, gradients, cotangent):
    d_features_BxLxD, d_table_VxD = (g * cotangent.astype(g.dtype) for g in gradients)
    return d_features_BxLxD, d_table_VxD, None, None


cross_entropy.defvjp(_forward, _backward)


def _scan(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk: int, parts: int, *, with_gradients: bool):
    """The sum, the targets hit unless there are gradients, and the gradients by features and table or None."""
    batch, length, width = features_BxLxD.shape
    # Slices run along L, so that a batch sharded over devices stays where it is.
    size = min(max(chunk * parts // batch, 1), length)
    table = table_VxD.astype(features_BxLxD.dtype)

    def slices(x_BxLx: jax.Array) -> jax.Array:
        """B×L×… -> G×P×N×…; one dimension of tokens, since XLA's CPU backend is slow to sum a product over two."""
        padded = jnp.pad(x_BxLx, [(0, 0), (0, -length % size)] + [(0, 0)] * (x_BxLx.ndim - 2))
        split = jnp.moveaxis(padded.reshape(batch, -1, size, *x_BxLx.shape[2:]), 1, 0)
        return split.reshape(split.shape[0], parts, -1, *x_BxLx.shape[2:])

    def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    def body(carry, part):
        total_P, hits_P, d_table_PxVxD = carry
        x_PxNxD, targets_PxN, weights_PxN = part
        logits_PxNxV = product("pnd,vd->pnv", x_PxNxD, table)
        top_PxNx1 = logits_PxNxV.max(axis=-1, keepdims=True)
        exponentials_PxNxV = jnp.exp(logits_PxNxV - top_PxNx1)
        denominator_PxNx1 = exponentials_PxNxV.sum(axis=-1, keepdims=True)
        target_logit_PxN = jnp.take_along_axis(logits_PxNxV, targets_PxN[..., None], axis=-1)[..., 0]
        nll_PxN = jnp.log(denominator_PxNx1[..., 0]) + top_PxNx1[..., 0] - target_logit_PxN
        total_P += jnp.where(weights_PxN > 0, nll_PxN * weights_PxN, 0).sum(axis=1)
        if not with_gradients:
            is_hit_PxN = (logits_PxNxV.argmax(axis=-1) == targets_PxN).astype(jnp.float32)
            return (total_P, hits_P + (is_hit_PxN * weights_PxN).sum(axis=1), d_table_PxVxD), None
        is_target_PxNxV = jnp.arange(table.shape[0], dtype=jnp.int32)[None, None] == targets_PxN[..., None]
        d_logits_PxNxV = exponentials_PxNxV / denominator_PxNx1 - is_target_PxNxV.astype(jnp.float32)
        d_logits_PxNxV = (d_logits_PxNxV * weights_PxN[..., None]).astype(table.dtype)
        d_table_PxVxD += product("pnv,pnd->pvd", d_logits_PxNxV, x_PxNxD)
        return (total_P, hits_P, d_table_PxVxD), product("pnv,vd->pnd", d_logits_PxNxV, table).astype(x_PxNxD.dtype)

    sliced = tuple(slices(x) for x in (features_BxLxD, targets_BxL, weights_BxL.astype(jnp.float32)))
    d_table = jnp.zeros((parts, *table_VxD.shape), jnp.float32) if with_gradients else None
    start = (jnp.zeros(parts, jnp.float32), jnp.zeros(parts, jnp.float32), d_table)
    (total_P, hits_P, d_table_PxVxD), d_features_GxPxNxD = jax.lax.scan(body, start, sliced)
    if d_features_GxPxNxD is None or d_table_PxVxD is None:
        return total_P.sum(), hits_P.sum(), None
    d_features_BxGxCxD = jnp.moveaxis(d_features_GxPxNxD.reshape(-1, batch, size, width), 0, 1)
    d_features_BxLxD = d_features_BxGxCxD.reshape(batch, -1, width)[:, :length]
    return total_P.sum(), hits_P.sum(), (d_features_BxLxD, d_table_PxVxD.sum(axis=0).astype(table_VxD.dtype))
