"""The kernels as differentiable functions: attention inside a chunk, and the state of the chunks before it.

A row of one chunk is quadratic attention; chunks without sums are the local part of mixed chunk attention; with sums it
is mixed chunk attention, and with the identity for f it is linear attention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from flash_lm.ops.blocked_attention import KEPT
from flash_lm.ops.kernels.backends import BACKENDS
from flash_lm.ops.kernels.programs import Form, Seen, entering_sums, score_derivatives, weighted_values
from flash_lm.ops.log_decay import Running
from flash_lm.ops.matmul import matmul, sum_axis

_BAND = 1024  # queries whose score derivatives exist at the same time


def attend(
    form: Form,
    q_NxGxCxK: jax.Array,
    k_NxGxCxK: jax.Array,
    v_NxGxCxE: jax.Array,
    seen: Seen,
    bias_W: jax.Array | None = None,
    across: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    decay: Running | None = None,
) -> jax.Array:
    """Chunkwise attention: f(scale · q kᵀ + b) / N · v inside each chunk, plus x Σ yᵀv over the chunks before it.

    With decays each weight is multiplied by what decays after the key up to and including the query.

    Args:
        form: form of the weights.
        q_NxGxCxK: queries.
        k_NxGxCxK: keys.
        v_NxGxCxE: values.
        seen: what each query sees of its chunk.
        bias_W: bias for the distances 1 − C … C − 1 from query to key, float32.
        across: x and y, N×G×C×K each: x is scaled by 1 / N, and zero if nothing is before it; y is zero if it does not
            continue into the next chunk; and whether the sum that enters a chunk leaves it too, (B or 1)×G int32. None:
            no sums.
        decay: running sums of logarithms of decays, N×G×C float32, in a causal form whose f is the identity; None:
            nothing decays.

    Returns:
        N×G×C×E, dtype of v.
    """
    tile, (size, expanded) = BACKENDS[form.backend].tile, v_NxGxCxE.shape[2:]
    rows = _BAND if size > _BAND else tile.rows
    tokens = functools.partial(_padded, axis=2, multiple=rows)
    width = BACKENDS[form.backend].width
    wide = lambda x: tokens(_padded(x, axis=3, multiple=width(x.shape[3])))
    depth = tile.values(v_NxGxCxE.dtype)
    # A narrow array is one tile, with the width that the programs need.
    v = tokens(_padded(v_NxGxCxE, axis=3, multiple=depth if expanded > depth else width(expanded)))
    seen = Seen(*(tokens(x) for x in seen))
    if bias_W is not None:
        missing = v.shape[2] - size
        bias_W = jnp.pad(bias_W, (missing, missing + 1))[None]
    if across is not None:
        across = (wide(across[0]), wide(across[1]), across[2])
    if decay is not None:
        assert form.function == "identity", form.function  # see _backward
        decay = decay.at(tokens)
    out: Any = _attend(form, wide(q_NxGxCxK), wide(k_NxGxCxK), v, seen, bias_W, across, decay)
    return out[:, :, :size, :expanded]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form, q, k, v, seen, bias, across, decay) -> jax.Array:
    return _forward(form, q, k, v, seen, bias, across, decay)[0]


def _forward(form: Form, q, k, v, seen: Seen, bias, across, decay: Running | None):
    """The output, and the residuals of the derivative."""
    sums, entering = None, None
    if across is not None:
        x, y, goes_on = across
        sums = entering_sums(BACKENDS[form.backend], y, v, goes_on)
        entering = (x, sums)
    out = weighted_values(form, q, k, v, seen, bias, entering, decay)
    out, sums = checkpoint_name((out, sums), KEPT)
    return out, (q, k, v, seen, bias, across, decay, sums)


def _backward(form: Form, kept, d_out: jax.Array):
    q, k, v, seen, bias, across, decay, sums = kept
    d_across, leaving = None, None
    if across is not None:
        x, y, goes_on = across
        d_sums = entering_sums(BACKENDS[form.backend], x, d_out, goes_on, reverse=True)
        d_x, d_y = matmul(d_out, sums, transpose_b=True), matmul(v, d_sums, transpose_b=True)
        d_across, leaving = (d_x.astype(x.dtype), d_y.astype(y.dtype), None), (y, d_sums)
    # Distances from key to query have the opposite sign; the last place is empty.
    turned = None if bias is None else jnp.roll(jnp.flip(bias, axis=1), -1, axis=1)
    d_v = weighted_values(form, k, q, d_out, seen, turned, leaving, decay, transposed=True)
    d_q, d_k, d_bias = _derivatives_of_scores(form, q, k, v, seen, bias, decay, d_out)
    d_decay = None
    if decay is not None:
        # A weight q·k e^(b_i − b_j) grows with b_i as with q_i, and shrinks with b_j as it grows with k_j.
        of_q, of_k = (sum_axis(x.astype(jnp.float32) * d_x, -1)[..., 0] for x, d_x in ((q, d_q), (k, d_k)))
        d_decay = Running(jnp.zeros_like(decay.coarse), of_q - of_k)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v, None, d_bias, d_across, d_decay


_attend.defvjp(_forward, _backward)


def _derivatives_of_scores(form: Form, q, k, v, seen: Seen, bias, decay: Running | None, d_out):
    """Derivatives by queries, keys and bias; one band of queries at a time, each with the scores of all its keys.

    If weights decay they are float32, since the derivative of the decays is their difference.
    """
    length = q.shape[2]
    band = min(length, _BAND)
    dtype = q.dtype if decay is None else jnp.float32

    def band_derivatives(carry, start: jax.Array):
        d_k, d_bias = carry
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, band, axis=2)
        of_distances = lambda x: jax.lax.dynamic_slice_in_dim(x, length - band - start, length + band, axis=1)
        q_band, about = cut(q), Seen(*(cut(x) for x in seen))
        # The distances that the band has: its first query is at `start`.
        d_scores = score_derivatives(
            form,
            q_band,
            k,
            cut(d_out),
            v,
            about,
            None if bias is None else of_distances(bias),
            None if decay is None else (decay.at(cut), decay),
        )
        d_q = (matmul(d_scores, k) * form.scale).astype(dtype)
        d_k += matmul(d_scores, q_band, transpose_a=True) * form.scale
        if bias is not None:
            diagonal_sums = _diagonal_sums(d_scores.sum(axis=(0, 1), dtype=jnp.float32))
            updated = of_distances(d_bias) + diagonal_sums
            d_bias = jax.lax.dynamic_update_slice_in_dim(d_bias, updated, length - band - start, axis=1)
        return (d_k, d_bias), d_q

    start = (jnp.zeros(k.shape, jnp.float32), None if bias is None else jnp.zeros_like(bias))
    (d_k, d_bias), d_q_bands = jax.lax.scan(band_derivatives, start, jnp.arange(0, length, band, dtype=jnp.int32))
    d_q = jnp.moveaxis(d_q_bands, 0, 2).reshape(q.shape)
    return d_q, d_k, d_bias


def _diagonal_sums(x_IxJ: jax.Array) -> jax.Array:
    """Sums over equal distances j − i, from 1 − I to J − 1, and a zero: 1×(I + J)."""
    rows, columns = x_IxJ.shape
    # Cut into rows that are one number shorter, each row is shifted one place to the right of the one above.
    flipped = jnp.pad(jnp.flip(x_IxJ, axis=0), ((0, 0), (0, rows)))
    skewed = flipped.reshape(-1)[: rows * (rows + columns - 1)].reshape(rows, rows + columns - 1)
    return jnp.pad(skewed.sum(axis=0), (0, 1))[None]


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
