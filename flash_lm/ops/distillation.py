"""Cross entropy and the divergence from a teacher's distribution, over a large vocabulary, a slice of tokens at a time.

As in `ops.cross_entropy`, logits exist for one slice only, and the forward pass also computes the gradients.
"""

import functools

import jax
import jax.numpy as jnp

from flash_lm.ops.cross_entropy import product, slice_logits
from flash_lm.ops.on_mesh import gather_table, sum_parts
from flash_lm.ops.token_slices import TokenSlices


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9, 10, 11))
def distillation(
    features_BxLxD: jax.Array,
    table_VxD: jax.Array,
    teacher_features_BxLxD: jax.Array,
    teacher_table_VxD: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    factor: float,
    chunk: int | None,
    parts: int = 1,
    cap: float = 0.0,
    teacher_cap: float = 0.0,
    few_targets: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Weighted sum over tokens of −log p[target] + factor · KL(q ‖ p), p of the model and q of the teacher.

    KL(q ‖ p) = Σ_v q_v (log q_v − log p_v) (Hinton et al. 2015, arXiv:1503.02531, at temperature 1).

    Args:
        features_BxLxD: features of the model.
        table_VxD: its unembedding.
        teacher_features_BxLxD: features of the teacher, whose width may differ. No gradient flows into it.
        teacher_table_VxD: its unembedding, likewise.
        targets_BxL: token ids, int32.
        weights_BxL: float32; 0 leaves a token out. No gradient flows into it.
        factor: of the divergence.
        chunk: see `cross_entropy`, also for the other arguments.
        parts: of the batch.
        cap: of the model's logits.
        teacher_cap: of the teacher's logits.
        few_targets: whether most weights may be 0.

    Returns:
        The sum in nats; and the part of the divergence in it, without gradients; float32 scalars.
    """
    inputs = features_BxLxD, table_VxD, teacher_features_BxLxD, teacher_table_VxD, targets_BxL, weights_BxL
    return _sums(*inputs, factor, chunk, parts, cap, teacher_cap, few_targets, with_gradients=False)[0]


def _forward(*arguments):
    return _sums(*arguments, with_gradients=True)


def _backward(factor, chunk, parts, cap, teacher_cap, few_targets, gradients, cotangents):
    d_features_BxLxD, d_table_VxD = (g * cotangents[0].astype(g.dtype) for g in gradients)
    return d_features_BxLxD, d_table_VxD, None, None, None, None


distillation.defvjp(_forward, _backward)


def _sums(
    features_BxLxD,
    table_VxD,
    teacher_features_BxLxD,
    teacher_table_VxD,
    targets_BxL,
    weights_BxL,
    factor: float,
    chunk: int | None,
    parts: int,
    cap: float,
    teacher_cap: float,
    few_targets: bool,
    *,
    with_gradients: bool,
):
    """The two sums, and the gradients with respect to features and table, or None."""
    slices = TokenSlices(weights_BxL, table_VxD.shape[0], chunk, parts, few_targets)
    # Each device gathers the tables once, before the loop.
    table = gather_table(table_VxD, features_BxLxD.dtype)
    teacher_table = gather_table(teacher_table_VxD, teacher_features_BxLxD.dtype)
    arrays = features_BxLxD, teacher_features_BxLxD, targets_BxL, weights_BxL.astype(jnp.float32)
    cut = tuple(slices.cut(x) for x in arrays)

    def body(i, carry):
        # Log-probabilities of one slice of tokens.
        total_P, divergence_P, d_table_PxDxV, d_features_BxGxSxD = carry
        x_PxNxD, teacher_PxNxD, targets_PxN, weights_PxN = (slices.take(x, i) for x in cut)
        logits_PxNxV = slice_logits(x_PxNxD, table, cap)
        log_p_PxNxV = jax.nn.log_softmax(logits_PxNxV, axis=-1)
        log_q_PxNxV = jax.nn.log_softmax(slice_logits(teacher_PxNxD, teacher_table, teacher_cap), axis=-1)
        q_PxNxV = jnp.exp(log_q_PxNxV)
        # Both terms, weighted; features may be NaN at weight 0.
        weighted = lambda x_PxN: jnp.where(weights_PxN > 0, x_PxN * weights_PxN, 0).sum(axis=1)
        log_target_PxN = jnp.take_along_axis(log_p_PxNxV, targets_PxN[..., None], axis=-1)[..., 0]
        of_slice_P = factor * weighted((q_PxNxV * (log_q_PxNxV - log_p_PxNxV)).sum(axis=-1))
        total_P += of_slice_P - weighted(log_target_PxN)
        divergence_P += of_slice_P
        if not with_gradients:
            return total_P, divergence_P, None, None
        # The gradient of the logits is the softmax less the two targets, a word and a distribution.
        is_target_PxNxV = jnp.arange(table.shape[0], dtype=jnp.int32)[None, None] == targets_PxN[..., None]
        p_PxNxV = jnp.exp(log_p_PxNxV)
        d_logits_PxNxV = p_PxNxV - is_target_PxNxV.astype(jnp.float32) + factor * (p_PxNxV - q_PxNxV)
        if cap:
            d_logits_PxNxV *= 1 - jnp.square(logits_PxNxV / cap)
        d_logits_PxNxV = (d_logits_PxNxV * weights_PxN[..., None]).astype(table.dtype)
        d_table_PxDxV += product("pnd,pnv->pdv", x_PxNxD, d_logits_PxNxV)
        d_x_PxNxD = product("pnv,vd->pnd", d_logits_PxNxV, table).astype(x_PxNxD.dtype)
        return total_P, divergence_P, d_table_PxDxV, slices.put(d_features_BxGxSxD, d_x_PxNxD, i)

    d_table = jnp.zeros((slices.parts, *table_VxD.T.shape), jnp.float32) if with_gradients else None
    d_features = jnp.zeros_like(cut[0]) if with_gradients else None
    zeros_P = jnp.zeros(slices.parts, jnp.float32)
    start = zeros_P, zeros_P, d_table, d_features
    total_P, divergence_P, d_table_PxDxV, d_features_BxGxSxD = jax.lax.fori_loop(0, slices.count, body, start)
    sums = total_P.sum(), divergence_P.sum()
    if d_features_BxGxSxD is None or d_table_PxDxV is None:
        return sums, None
    d_features_BxLxD = jnp.where(weights_BxL[..., None] > 0, slices.join(d_features_BxGxSxD), 0)
    d_table_VxD = sum_parts(d_table_PxDxV.swapaxes(1, 2)).astype(table_VxD.dtype)
    return sums, (d_features_BxLxD, d_table_VxD)
