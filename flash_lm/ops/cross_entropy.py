"""Cross entropy over a large vocabulary, a slice of the tokens at a time.

Logits exist for one slice only. Under differentiation the forward pass also computes the gradients, since it has the
slice's softmax: three products instead of the four of a recomputing backward pass, and no B×L×V array. The tokens that
count are moved to the front of their rows first, and slices end with them: a masked batch has few.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.compact import compacted


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def cross_entropy(
    features_BxLxD: jax.Array,
    table_VxD: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    chunk: int,
    parts: int = 1,
    z_loss: float = 0.0,
    cap: float = 0.0,
    smoothing: float = 0.0,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Weighted sum over tokens of −log softmax(features · tableᵀ)[target], and two penalties in it.

    The z-loss is z · log² Z, Z the softmax's denominator, which keeps logits from drifting ("PaLM", section 5). With
    label smoothing ε the target has the probability 1 − ε, and ε is spread over all words (Szegedy et al. 2016,
    arXiv:1512.00567, section 7): the penalty is ε times the target's logit less the mean of all logits.

    Args:
        features_BxLxD: in the computation's dtype.
        table_VxD: the unembedding.
        targets_BxL: token ids, int32.
        weights_BxL: float32; 0 leaves a token out. No gradient flows into it.
        chunk: tokens in a slice whose logits exist at the same time.
        parts: number of parts of the batch, such as its devices; B is a multiple of it. Each part sums its own gradient
            of the table, so that devices exchange it once rather than for every slice.
        z_loss: z.
        cap: logits are cap · tanh(logits / cap); 0: as they are.
        smoothing: ε.

    Returns:
        The sum in nats, penalties included; and the z-loss and the smoothing alone, without gradients; float32 scalars.
    """
    found = _sum(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts, z_loss, cap, smoothing)
    return found.total, (found.z, found.smoothing)


def cross_entropy_and_hits(
    features_BxLxD: jax.Array,
    table_VxD: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    chunk: int,
    parts: int = 1,
    cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """The sum without a z-loss, not differentiable, and the weighted number of targets with the largest logit."""
    found = _sum(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts, cap=cap)
    return found.total, found.hits


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """Cap · tanh(x / cap); x if cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def _forward(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts, z_loss, cap, smoothing):
    arguments = features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts, z_loss, cap, smoothing
    found = _sum(*arguments, with_gradients=True)
    return (found.total, (found.z, found.smoothing)), found.gradients


def _backward(chunk, parts, z_loss, cap, smoothing, gradients, cotangents):
    d_features_BxLxD, d_table_VxD = (g * cotangents[0].astype(g.dtype) for g in gradients)
    return d_features_BxLxD, d_table_VxD, None, None


class _Sums(NamedTuple):
    total: jax.Array
    z: jax.Array
    smoothing: jax.Array
    hits: jax.Array  # zero if gradients are computed
    gradients: tuple[jax.Array, jax.Array] | None  # with respect to features and table


cross_entropy.defvjp(_forward, _backward)


def _sum(
    features_BxLxD,
    table_VxD,
    targets_BxL,
    weights_BxL,
    chunk: int,
    parts: int,
    z_loss: float = 0.0,
    cap: float = 0.0,
    smoothing: float = 0.0,
    with_gradients: bool = False,
) -> _Sums:
    batch, length, width = features_BxLxD.shape
    # Slices run along L, so that a batch sharded over devices stays in place.
    size = min(max(chunk * parts // batch, 1), length)
    table = table_VxD.astype(features_BxLxD.dtype)
    counts = compacted(weights_BxL > 0, length)

    def slices(x_BxLx: jax.Array) -> jax.Array:
        """B×L×… -> G×P×N×…; one dimension of tokens, since XLA's CPU backend is slow at products that sum over two."""
        padded = jnp.pad(x_BxLx, [(0, 0), (0, -length % size)] + [(0, 0)] * (x_BxLx.ndim - 2))
        split = jnp.moveaxis(padded.reshape(batch, -1, size, *x_BxLx.shape[2:]), 1, 0)
        return split.reshape(split.shape[0], parts, -1, *x_BxLx.shape[2:])

    def in_front(x_BxL: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_BxL, counts.order_BxN, axis=1)

    def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    def body(place, carry):
        total_P, z_P, smoothing_P, hits_P, d_table_PxDxV, d_features_GxPxNxD = carry
        x_PxNxD, targets_PxN, weights_PxN = (jax.lax.dynamic_index_in_dim(x, place, keepdims=False) for x in sliced)
        logits_PxNxV = soft_capped(product("pnd,vd->pnv", x_PxNxD, table), cap)
        top_PxNx1 = logits_PxNxV.max(axis=-1, keepdims=True)
        exponentials_PxNxV = jnp.exp(logits_PxNxV - top_PxNx1)
        denominator_PxNx1 = exponentials_PxNxV.sum(axis=-1, keepdims=True)
        target_logit_PxN = jnp.take_along_axis(logits_PxNxV, targets_PxN[..., None], axis=-1)[..., 0]
        log_z_PxN = jnp.log(denominator_PxNx1[..., 0]) + top_PxNx1[..., 0]
        weighted = lambda x_PxN: jnp.where(weights_PxN > 0, x_PxN * weights_PxN, 0).sum(axis=1)
        total_P += weighted(log_z_PxN - target_logit_PxN)
        if z_loss:
            z_P += (here_P := weighted(z_loss * jnp.square(log_z_PxN)))
            total_P += here_P
        if smoothing:
            smoothing_P += (here_P := weighted(smoothing * (target_logit_PxN - logits_PxNxV.mean(axis=-1))))
            total_P += here_P
        if not with_gradients:
            is_hit_PxN = (logits_PxNxV.argmax(axis=-1) == targets_PxN).astype(jnp.float32)
            return total_P, z_P, smoothing_P, hits_P + (is_hit_PxN * weights_PxN).sum(axis=1), None, None
        is_target_PxNxV = jnp.arange(table.shape[0], dtype=jnp.int32)[None, None] == targets_PxN[..., None]
        probabilities_PxNxV = exponentials_PxNxV / denominator_PxNx1
        if z_loss:
            probabilities_PxNxV *= 1 + 2 * z_loss * log_z_PxN[..., None]
        expected_PxNxV = (1 - smoothing) * is_target_PxNxV.astype(jnp.float32) + smoothing / table.shape[0]
        d_logits_PxNxV = probabilities_PxNxV - expected_PxNxV
        if cap:
            d_logits_PxNxV *= 1 - jnp.square(logits_PxNxV / cap)
        d_logits_PxNxV = (d_logits_PxNxV * weights_PxN[..., None]).astype(table.dtype)
        d_table_PxDxV += product("pnd,pnv->pdv", x_PxNxD, d_logits_PxNxV)  # on CPUs faster than its transpose
        d_x_PxNxD = product("pnv,vd->pnd", d_logits_PxNxV, table).astype(x_PxNxD.dtype)
        d_features_GxPxNxD = jax.lax.dynamic_update_index_in_dim(d_features_GxPxNxD, d_x_PxNxD, place, axis=0)
        return total_P, z_P, smoothing_P, hits_P, d_table_PxDxV, d_features_GxPxNxD

    ahead_BxLxD = counts.take(features_BxLxD[:, None])[:, 0]
    sliced = tuple(slices(x) for x in (ahead_BxLxD, in_front(targets_BxL), in_front(weights_BxL.astype(jnp.float32))))
    d_table = jnp.zeros((parts, *table_VxD.T.shape), jnp.float32) if with_gradients else None
    d_features = jnp.zeros_like(sliced[0]) if with_gradients else None
    start = (*(jnp.zeros(parts, jnp.float32) for _ in range(4)), d_table, d_features)
    most = counts.before_BxM[:, -1].max()
    *sums, d_table_PxDxV, d_features_GxPxNxD = jax.lax.fori_loop(0, -(-most // size), body, start)
    total, z, smooth, hits = (sum_P.sum() for sum_P in sums)
    if d_features_GxPxNxD is None or d_table_PxDxV is None:
        return _Sums(total, z, smooth, hits, None)
    d_ahead_BxGxCxD = jnp.moveaxis(d_features_GxPxNxD.reshape(-1, batch, size, width), 0, 1)
    d_ahead_BxLxD = d_ahead_BxGxCxD.reshape(batch, -1, width)[:, :length]
    d_features_BxLxD = counts.put_back(d_ahead_BxLxD[:, None])[:, 0]
    d_features_BxLxD = jnp.where(weights_BxL[..., None] > 0, d_features_BxLxD, 0)
    d_table_VxD = d_table_PxDxV.sum(axis=0).T.astype(table_VxD.dtype)
    return _Sums(total, z, smooth, hits, (d_features_BxLxD, d_table_VxD))
