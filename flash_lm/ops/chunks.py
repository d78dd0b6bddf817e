"""Chunkwise form: sequences cut into chunks, and the (decayed) sum of states over the chunks before each.

Documents are contiguous, so at most one of them crosses the start of a chunk: that of the last token before it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flash_lm.ops.log_decay import decay_between, running

_GROUP = 32  # chunks whose sums are added by one product
_HIGHEST = jax.lax.Precision.HIGHEST


def to_chunks(x_BxLx: jax.Array, chunk_size: int) -> jax.Array:
    """B×L×… -> B×G×C×…, the last chunk padded with zeros."""
    missing = -x_BxLx.shape[1] % chunk_size
    padded = jnp.pad(x_BxLx, [(0, 0), (0, missing)] + [(0, 0)] * (x_BxLx.ndim - 2)) if missing else x_BxLx
    return padded.reshape(x_BxLx.shape[0], -1, chunk_size, *x_BxLx.shape[2:])


def run_chunks(runs_BxL: jax.Array, size: int) -> jax.Array:
    """B×L -> B×G×C, the last chunk filled as if the last document, or its padding, went on."""
    return to_chunks(jnp.pad(runs_BxL, ((0, 0), (0, -runs_BxL.shape[1] % size)), mode="edge"), size)


def from_chunks(x_BxGxCx: jax.Array, length: int) -> jax.Array:
    """B×G×C×… -> B×L×…, without the padding of the last chunk."""
    batch, chunks, size = x_BxGxCx.shape[:3]
    return x_BxGxCx.reshape(batch, chunks * size, *x_BxGxCx.shape[3:])[:, :length]


def head_chunks(x_BxHxLx: jax.Array, size: int) -> jax.Array:
    """B×H×L×… -> B×H×G×C×…."""
    batch, heads = x_BxHxLx.shape[:2]
    chunked = to_chunks(x_BxHxLx.reshape(-1, *x_BxHxLx.shape[2:]), size)
    return chunked.reshape(batch, heads, *chunked.shape[1:])


def head_rows(x_BxHxGxCxE: jax.Array, length: int) -> jax.Array:
    """The inverse of `head_chunks`, for rows of `length` tokens."""
    batch, heads = x_BxHxGxCxE.shape[:2]
    rows = from_chunks(x_BxHxGxCxE.reshape(-1, *x_BxHxGxCxE.shape[2:]), length)
    return rows.reshape(batch, heads, *rows.shape[1:])


def entering_runs(last_BxG: jax.Array) -> jax.Array:
    """The run that enters each chunk, from each chunk's last; tokens before the sequence belong to its first run."""
    return jnp.pad(last_BxG[:, :-1], ((0, 0), (1, 0)), constant_values=1)


def sums_before(
    sums_NxGxKxE: jax.Array,
    last_BxG: jax.Array,
    initial_NxKxE: jax.Array | None = None,
    through_NxG: jax.Array | None = None,
) -> jax.Array:
    """Inter-chunk recurrence: the state that enters each chunk, for the document that enters it, N×G×K×E.

    Groups of chunks are summed by a product with a triangle, several times as fast on a CPU as a scan over the chunks;
    a triangle over all chunks would be quadratic in the length, so groups are scanned.

    Args:
        sums_NxGxKxE: each chunk's sum over its last document; the results have its dtype, and are added in float32.
        last_BxG: run of each chunk's last token, (N or 1)×G.
        initial_NxKxE: the state before the sequence; None: zeros.
        through_NxG: logarithm of the decay through each chunk, not positive; None: no decay.
    """
    # Group the chunks; inside a group, earlier chunks of the entering document are summed by one product.
    rows, chunks = sums_NxGxKxE.shape[:2]
    size = min(chunks, _GROUP)
    sums_NxJxGxX = to_chunks(sums_NxGxKxE.reshape(rows, chunks, -1), size)
    last_BxJxG, entering_BxJxG = (to_chunks(x, size) for x in (last_BxG, entering_runs(last_BxG)))
    before_BxJxGxG = (entering_BxJxG[..., None] == last_BxJxG[:, :, None]) & jnp.tri(size, k=-1, dtype=bool)[None, None]
    in_last_run_BxJx1xG = (last_BxJxG == last_BxJxG[..., -1:])[:, :, None]
    kept_NxJx1, until_NxJxGx1 = jnp.ones((1, 1, 1)), jnp.ones((1, 1, 1, 1))
    if through_NxG is not None:
        # With decay, the weight of an earlier chunk is the decay through the chunks between.
        after = running(to_chunks(through_NxG, size), last_BxJxG)
        before = after.at(lambda x: jnp.pad(x[..., :-1], ((0, 0), (0, 0), (1, 0))))
        end = after.at(lambda x: x[..., -1:])
        earlier = after.at(lambda x: x[..., None, :])
        before_BxJxGxG = decay_between(before.at(lambda x: x[..., None]), earlier, before_BxJxGxG)
        in_last_run_BxJx1xG = decay_between(end.at(lambda x: x[..., None]), earlier, in_last_run_BxJx1xG)
        kept_NxJx1, until_NxJxGx1 = jnp.exp(end.total()), jnp.exp(before.total())[..., None]
    out_NxJxGxX: Any = _add_chunk(before_BxJxGxG, sums_NxJxGxX, sums_NxGxKxE.dtype)
    # Across groups: a scan carries the state from group to group while the document goes on.
    if chunks > size or initial_NxKxE is not None:
        group_sums_NxJx1xX: Any = _add_chunk(in_last_run_BxJx1xG, sums_NxJxGxX, jnp.dtype(jnp.float32))
        group_sums_NxJxX = group_sums_NxJx1xX[:, :, 0]
        goes_on_BxJ = entering_BxJxG[..., 0] == last_BxJxG[..., -1]

        def next_group(carry_NxX: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            group_sum_NxX, goes_on_B, kept_Nx1 = group
            return jnp.where(goes_on_B[:, None], carry_NxX * kept_Nx1, 0) + group_sum_NxX, carry_NxX

        start = jnp.zeros_like(group_sums_NxJxX[:, 0]) if initial_NxKxE is None else initial_NxKxE.reshape(rows, -1)
        kept_NxJx1 = jnp.broadcast_to(kept_NxJx1, (kept_NxJx1.shape[0], group_sums_NxJxX.shape[1], 1))
        groups = (jnp.moveaxis(x, 1, 0) for x in (group_sums_NxJxX, goes_on_BxJ, kept_NxJx1))
        _, carried_JxNxX = jax.lax.scan(next_group, start, tuple(groups))
        # The carried state reaches the chunks of the group that continue the same document.
        same_BxJxG = entering_BxJxG == entering_BxJxG[..., :1]
        carried_NxJx1xX = jnp.moveaxis(carried_JxNxX, 0, 1)[:, :, None]
        carried = jnp.where(same_BxJxG[..., None], carried_NxJx1xX * until_NxJxGx1, 0)
        out_NxJxGxX = (out_NxJxGxX + carried).astype(out_NxJxGxX.dtype)
    return from_chunks(out_NxJxGxX, chunks).reshape(sums_NxGxKxE.shape)


def _product(weights_NxJxPxG: jax.Array, sums_NxJxGxX: jax.Array, dtype: jnp.dtype) -> jax.Array:
    # Not at an accelerator's default precision, which would round the sums, if they are float32.
    weights = weights_NxJxPxG.astype(sums_NxJxGxX.dtype)
    weights = jnp.broadcast_to(weights, (len(sums_NxJxGxX), *weights.shape[1:]))
    return jnp.einsum("njpg,njgx->njpx", weights, sums_NxJxGxX, precision=_HIGHEST, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _add_chunk(weights_NxJxPxG: jax.Array, sums_NxJxGxX: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Weighted sum, or sum of a selection: N×J×P×X."""
    return _product(weights_NxJxPxG, sums_NxJxGxX, dtype)


def _added_forward(weights_NxJxPxG: jax.Array, sums_NxJxGxX: jax.Array, dtype: jnp.dtype):
    has_derivative = jnp.issubdtype(weights_NxJxPxG.dtype, jnp.floating)
    kept = weights_NxJxPxG, sums_NxJxGxX if has_derivative else None, jnp.zeros((), sums_NxJxGxX.dtype)
    return _product(weights_NxJxPxG, sums_NxJxGxX, dtype), kept


def _added_backward(dtype: jnp.dtype, kept: tuple[jax.Array, jax.Array | None, jax.Array], d_NxJxPxX: jax.Array):
    weights_NxJxPxG, sums_NxJxGxX, like_sums = kept
    d_NxJxPxX = d_NxJxPxX.astype(like_sums.dtype)
    # The derivative by XLA would transpose the large array instead.
    turned_NxJxGxP = jax.lax.optimization_barrier(jnp.swapaxes(weights_NxJxPxG, -1, -2))
    d_sums = _product(turned_NxJxGxP, d_NxJxPxX, like_sums.dtype)
    if sums_NxJxGxX is None:
        return None, d_sums
    d_weights = jnp.einsum(
        "njpx,njgx->njpg", d_NxJxPxX, sums_NxJxGxX, precision=_HIGHEST, preferred_element_type=weights_NxJxPxG.dtype
    )
    return d_weights.sum(axis=0, keepdims=True) if len(weights_NxJxPxG) == 1 else d_weights, d_sums


_add_chunk.defvjp(_added_forward, _added_backward)
