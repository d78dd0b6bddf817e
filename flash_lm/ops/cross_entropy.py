"""Cross entropy over a large vocabulary, a slice of the tokens at a time.

Logits exist for one slice only. Under differentiation the forward pass also computes the gradients, since it has the
slice's softmax: three products instead of the four of a recomputing backward pass, and no B×L×V array. If few tokens
count, as in a masked batch, they are moved to the front of their rows first, and slices end with them. Otherwise the
number of slices is known when the step is compiled.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.on_mesh import gather_table, sum_parts
from flash_lm.ops.target import target_platform
from flash_lm.ops.token_slices import TokenSlices


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8, 9))
def cross_entropy(
    features_BxLxD: jax.Array,
    table_VxD: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    chunk: int | None,
    parts: int = 1,
    z_loss: float = 0.0,
    cap: float = 0.0,
    smoothing: float = 0.0,
    few_targets: bool = False,
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
        chunk: tokens in a slice whose logits exist at the same time; None: see `slice_tokens`.
        parts: number of parts of the batch, such as its devices; B is a multiple of it. Each part sums a gradient
            of the table, so that devices exchange it once rather than for every slice.
        z_loss: z.
        cap: logits are cap · tanh(logits / cap); 0: as they are.
        smoothing: ε.
        few_targets: whether most weights may be 0: only slices with other tokens are computed then.

    Returns:
        The sum in nats, penalties included; and the z-loss and the smoothing alone, without gradients; float32 scalars.
    """
    slices = TokenSlices(weights_BxL, table_VxD.shape[0], chunk, parts, few_targets)
    loss = _sum(features_BxLxD, table_VxD, targets_BxL, weights_BxL, slices, z_loss, cap, smoothing)
    return loss.total, (loss.z, loss.smoothing)


def token_scores(
    features_BxLxD: jax.Array,
    table_VxD: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    chunk: int | None,
    parts: int = 1,
    cap: float = 0.0,
    few_targets: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """−log softmax(features · tableᵀ)[target], in nats, and whether the target has the largest logit, 1 or 0.

    Args:
        features_BxLxD: see `cross_entropy`, for all arguments.
        table_VxD: the unembedding.
        targets_BxL: token ids.
        weights_BxL: only where it is 0 matters: such a token has zeros.
        chunk: tokens in a slice.
        parts: of the batch.
        cap: of the logits.
        few_targets: whether most weights may be 0.

    Returns:
        Two B×L float32, without gradients.
    """
    # Slice by slice, so that logits of all tokens never exist at once.
    slices = TokenSlices(weights_BxL, table_VxD.shape[0], chunk, parts, few_targets)
    table = gather_table(table_VxD, features_BxLxD.dtype)
    cut = tuple(slices.cut(x) for x in (features_BxLxD, targets_BxL))

    def body(i, scores):
        x_PxNxD, targets_PxN = (slices.take(x, i) for x in cut)
        logits_PxNxV = slice_logits(x_PxNxD, table, cap)
        log_z_PxN = jax.nn.logsumexp(logits_PxNxV, axis=-1)
        target_logit_PxN = jnp.take_along_axis(logits_PxNxV, targets_PxN[..., None], axis=-1)[..., 0]
        is_hit_PxN = (logits_PxNxV.argmax(axis=-1) == targets_PxN).astype(jnp.float32)
        slice_scores = log_z_PxN - target_logit_PxN, is_hit_PxN
        return tuple(slices.put(x, y, i) for x, y in zip(scores, slice_scores, strict=True))

    start = (jnp.zeros(cut[1].shape, jnp.float32),) * 2
    nll_BxL, hits_BxL = (slices.join(x) for x in jax.lax.fori_loop(0, slices.count, body, start))
    return jnp.where(weights_BxL > 0, nll_BxL, 0), jnp.where(weights_BxL > 0, hits_BxL, 0)


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """Cap · tanh(x / cap); x if cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum with float32 sums and results."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def slice_logits(x_PxNxD: jax.Array, table_VxD: jax.Array, cap: float) -> jax.Array:
    """The logits of a slice of tokens, P×N×V float32."""
    return soft_capped(product("pnd,vd->pnv", x_PxNxD, table_VxD), cap)


def _forward(features_BxLxD, table_VxD, targets_BxL, weights_BxL, chunk, parts, z_loss, cap, smoothing, few_targets):
    slices = TokenSlices(weights_BxL, table_VxD.shape[0], chunk, parts, few_targets)
    arguments = features_BxLxD, table_VxD, targets_BxL, weights_BxL, slices, z_loss, cap, smoothing
    loss = _sum(*arguments, with_gradients=True)
    return (loss.total, (loss.z, loss.smoothing)), loss.gradients


def _backward(chunk, parts, z_loss, cap, smoothing, few_targets, gradients, cotangents):
    d_features_BxLxD, d_table_VxD = (g * cotangents[0].astype(g.dtype) for g in gradients)
    return d_features_BxLxD, d_table_VxD, None, None


class _Sums(NamedTuple):
    total: jax.Array
    z: jax.Array
    smoothing: jax.Array
    gradients: tuple[jax.Array, jax.Array] | None  # with respect to features and table


cross_entropy.defvjp(_forward, _backward)


def _sum(
    features_BxLxD,
    table_VxD,
    targets_BxL,
    weights_BxL,
    slices: TokenSlices,
    z_loss: float = 0.0,
    cap: float = 0.0,
    smoothing: float = 0.0,
    with_gradients: bool = False,
) -> _Sums:
    # Each device gathers the table once, before the loop: XLA would gather the part of fsdp in every slice.
    table = gather_table(table_VxD, features_BxLxD.dtype)
    cut = tuple(slices.cut(x) for x in (features_BxLxD, targets_BxL, weights_BxL.astype(jnp.float32)))

    def body(i, carry):
        # Logits and log Z of one slice of tokens.
        total_P, z_P, smoothing_P, d_table_PxDxV, d_features_BxGxSxD = carry
        x_PxNxD, targets_PxN, weights_PxN = (slices.take(x, i) for x in cut)
        logits_PxNxV = slice_logits(x_PxNxD, table, cap)
        top_PxNx1 = logits_PxNxV.max(axis=-1, keepdims=True)
        exponentials_PxNxV = jnp.exp(logits_PxNxV - top_PxNx1)
        denominator_PxNx1 = exponentials_PxNxV.sum(axis=-1, keepdims=True)
        target_logit_PxN = jnp.take_along_axis(logits_PxNxV, targets_PxN[..., None], axis=-1)[..., 0]
        log_z_PxN = jnp.log(denominator_PxNx1[..., 0]) + top_PxNx1[..., 0]
        # Loss and penalties, weighted; the value allows NaN features at weight 0, the gradient of the table does not.
        weighted = lambda x_PxN: jnp.where(weights_PxN > 0, x_PxN * weights_PxN, 0).sum(axis=1)
        total_P += weighted(log_z_PxN - target_logit_PxN)
        if z_loss:
            z_P += (penalty_P := weighted(z_loss * jnp.square(log_z_PxN)))
            total_P += penalty_P
        if smoothing:
            smoothing_P += (penalty_P := weighted(smoothing * (target_logit_PxN - logits_PxNxV.mean(axis=-1))))
            total_P += penalty_P
        # The gradient of the logits is softmax minus target, so it needs no second pass over the slices.
        if not with_gradients:
            return total_P, z_P, smoothing_P, None, None
        is_target_PxNxV = jnp.arange(table.shape[0], dtype=jnp.int32)[None, None] == targets_PxN[..., None]
        # A CPU keeps the exponentials. On a TPU it is cheaper to compute others where the products read them: XLA would
        # write the gradient of the logits otherwise, and read it again.
        if target_platform() == "cpu":
            probabilities_PxNxV = exponentials_PxNxV / denominator_PxNx1
        else:
            probabilities_PxNxV = jnp.exp(logits_PxNxV - log_z_PxN[..., None])
        if z_loss:
            probabilities_PxNxV *= 1 + 2 * z_loss * log_z_PxN[..., None]
        expected_PxNxV = (1 - smoothing) * is_target_PxNxV.astype(jnp.float32) + smoothing / table.shape[0]
        d_logits_PxNxV = probabilities_PxNxV - expected_PxNxV
        if cap:
            d_logits_PxNxV *= 1 - jnp.square(logits_PxNxV / cap)
        # Gradients of the table, summed, and of the features of this slice.
        d_logits_PxNxV = (d_logits_PxNxV * weights_PxN[..., None]).astype(table.dtype)
        d_table_PxDxV += product("pnd,pnv->pdv", x_PxNxD, d_logits_PxNxV)  # on CPUs faster than its transpose
        d_x_PxNxD = product("pnv,vd->pnd", d_logits_PxNxV, table).astype(x_PxNxD.dtype)
        d_features_BxGxSxD = slices.put(d_features_BxGxSxD, d_x_PxNxD, i)
        return total_P, z_P, smoothing_P, d_table_PxDxV, d_features_BxGxSxD

    # Without gradients the accumulators are None, and the loop carries the sums only.
    d_table = jnp.zeros((slices.parts, *table_VxD.T.shape), jnp.float32) if with_gradients else None
    d_features = jnp.zeros_like(cut[0]) if with_gradients else None
    start = (*(jnp.zeros(slices.parts, jnp.float32) for _ in range(3)), d_table, d_features)
    *sums, d_table_PxDxV, d_features_BxGxSxD = jax.lax.fori_loop(0, slices.count, body, start)
    total, z, smooth = (sum_P.sum() for sum_P in sums)
    if d_features_BxGxSxD is None or d_table_PxDxV is None:
        return _Sums(total, z, smooth, None)
    # Back to the order of the batch; devices exchange the gradient of the table once.
    d_features_BxLxD = slices.join(d_features_BxGxSxD)
    d_features_BxLxD = jnp.where(weights_BxL[..., None] > 0, d_features_BxLxD, 0)
    d_table_VxD = sum_parts(d_table_PxDxV.swapaxes(1, 2)).astype(table_VxD.dtype)
    return _Sums(total, z, smooth, (d_features_BxLxD, d_table_VxD))
