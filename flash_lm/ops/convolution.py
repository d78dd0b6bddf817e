"""Short convolutions, depthwise or full, causal or centred, inside each document.

A sum of shifted copies. XLA's depthwise convolution is many times slower on a CPU (4×1024×768, four
taps: 175 ms against 1.4, with gradients 417 against 66), and it cannot see where a document ends. Taps are in the order
of the tokens that they read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flash_lm.ops.matmul import matmul
from flash_lm.ops.target import target_platform

_SMALLEST_BLOCK = 32  # tokens
_FEW_TAPS = 8


def reach(taps: Any, causal: bool) -> tuple[Any, Any]:
    """How many tokens before and after the current one a filter reads; an even centred filter reads one more before.

    Args:
        taps: W, which may be traced.
        causal: the last tap reads the current token; otherwise the filter is centred.
    """
    return (taps - 1, 0) if causal else (taps // 2, (taps - 1) // 2)


def convolve(x_BxLxD: jax.Array, taps: jax.Array, runs_BxL: jax.Array, *, causal: bool) -> jax.Array:
    """Convolution Σ_i taps_i x_(t + i − before) over the tokens of the document of t.

    Args:
        x_BxLxD: the input.
        taps: W×D, a filter for each channel; or W×D×E, from all channels to all.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        causal: read no token after t.

    Returns:
        B×L×D or B×L×E, dtype of x. Padding gets zeros.
    """
    before, _ = reach(len(taps), causal)
    if taps.ndim == 2:
        return _convolve(x_BxLxD, taps, runs_BxL, before)
    return _sum_taps([_read(x_BxLxD, runs_BxL, i - before) for i in range(len(taps))], taps)


def convolve_heads(x_BxHxLxE: jax.Array, taps_WxH: jax.Array) -> jax.Array:
    """Centred convolution Σ_i taps_ih x_(t + i − before) with one filter per head.

    A block of tokens is a product of a band matrix with the two blocks that it reads: for tens of taps that is faster
    than as many shifted copies (with 33 taps a step of Nyströmformer at configs/small.py takes 0.6 of the time on a
    CPU).

    Args:
        x_BxHxLxE: the input, one document per sequence, zero at padding.
        taps_WxH: a filter for each head.

    Returns:
        B×H×L×E, dtype of x.
    """
    (batch, heads, length, width), count = x_BxHxLxE.shape, len(taps_WxH)
    size, (before, _) = max(_SMALLEST_BLOCK, count - 1), reach(count, False)
    blocks = -(-length // size)
    after = (blocks + 1) * size - length - before
    padded = jnp.pad(x_BxHxLxE, ((0, 0), (0, 0), (before, after), (0, 0))).reshape(batch, heads, -1, size, width)
    read_BxHxGx2CxE = jnp.concatenate([padded[:, :, :-1], padded[:, :, 1:]], axis=3)
    # All sequences and blocks share the band of a head, so they are columns of one product.
    read_Hx2CxN = jnp.transpose(read_BxHxGx2CxE, (1, 3, 0, 2, 4)).reshape(heads, 2 * size, -1)
    tap_Cx2C = jnp.arange(2 * size, dtype=jnp.int32)[None] - jnp.arange(size, dtype=jnp.int32)[:, None]
    band_HxCx2C = taps_WxH.T.at[:, jnp.where(tap_Cx2C < 0, count, tap_Cx2C)].get(mode="fill", fill_value=0)
    out_HxCxN = matmul(band_HxCx2C.astype(x_BxHxLxE.dtype), read_Hx2CxN).astype(x_BxHxLxE.dtype)
    out_BxHxGxCxE = jnp.transpose(out_HxCxN.reshape(heads, size, batch, blocks, width), (2, 0, 3, 1, 4))
    return out_BxHxGxCxE.reshape(batch, heads, -1, width)[:, :, :length]


def continue_convolution(
    x_BxLxD: jax.Array, taps: jax.Array, last_BxWxD: jax.Array, lengths_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Causal convolution that continues each sequence from its last inputs (decode state).

    Args:
        x_BxLxD: new tokens, padded on the right.
        taps: as for `convolve`.
        last_BxWxD: the W − 1 tokens before these, oldest first; zeros before the first token of all.
        lengths_B: number of new tokens, 0 … L.

    Returns:
        B×L×D or B×L×E, meaningless at padding; and the last W − 1 tokens after the new ones.
    """
    length = x_BxLxD.shape[1]
    joined_BxTxD = jnp.concatenate([last_BxWxD.astype(x_BxLxD.dtype), x_BxLxD], axis=1)
    out = _sum_taps([joined_BxTxD[:, i : i + length] for i in range(len(taps))], taps)
    return out, last_inputs(joined_BxTxD, lengths_B, last_BxWxD)


def last_inputs(joined_BxTxD: jax.Array, lengths_B: jax.Array, before_BxWxD: jax.Array) -> jax.Array:
    """The last inputs of each sequence, for the decode state.

    Args:
        joined_BxTxD: those before the new ones, and the new ones, padded on the right.
        lengths_B: number of new ones.
        before_BxWxD: those before, for their number and dtype.
    """
    kept = before_BxWxD.shape[1]
    newest_BxW = lengths_B[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
    return jnp.take_along_axis(joined_BxTxD, newest_BxW[..., None], axis=1).astype(before_BxWxD.dtype)


def seen_by_taps(runs_BxL: jax.Array, taps: int, *, causal: bool) -> jax.Array:
    """Mask of the taps that read a token of the same document, (B or 1)×L×W; false at padding."""
    before, _ = reach(taps, causal)
    return jnp.stack([_visible_taps(runs_BxL, i - before) for i in range(taps)], axis=-1)


def _visible_taps(runs_BxL: jax.Array, offset: int) -> jax.Array:
    """Whether the token `offset` positions later is of the same document."""
    return (_shift(runs_BxL, offset) == runs_BxL) & (runs_BxL > 0)


def _read(x_BxLxD: jax.Array, runs_BxL: jax.Array, offset: int) -> jax.Array:
    """The token `offset` positions later, where that is of the same document; else zero."""
    return jnp.where(_visible_taps(runs_BxL, offset)[..., None], _shift(x_BxLxD, offset), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _convolve(x_BxLxD: jax.Array, taps_WxD: jax.Array, runs_BxL: jax.Array, before: int) -> jax.Array:
    """Depthwise convolution whose derivative keeps only the input: its taps read the shifted input."""
    return _sum_taps([_read(x_BxLxD, runs_BxL, i - before) for i in range(len(taps_WxD))], taps_WxD)


def _convolved_backward(before: int, kept: tuple[jax.Array, jax.Array, jax.Array], d_out: jax.Array):
    x, taps, runs = kept
    # The gradient of x is the convolution with the reversed filter.
    d_x = _sum_taps([_read(d_out, runs, before - i) for i in range(len(taps))], taps)
    length, around = x.shape[1], (before, len(taps) - 1 - before)
    beside, runs_beside = (jnp.pad(y, ((0, 0), around, *[(0, 0)] * (y.ndim - 2))) for y in (x, runs))

    def d_tap(i: jax.Array | int) -> jax.Array:
        read, read_runs = (jax.lax.dynamic_slice_in_dim(y, i, length, axis=1) for y in (beside, runs_beside))
        seen_BxL = (read_runs == runs) & (runs > 0)
        return _multiply_channels(jnp.where(seen_BxL[..., None], read, 0), d_out)

    # A GPU reads the inputs once for all taps of a short filter. Else one tap after another, or XLA holds what each of
    # them reads (4×1024×768 on a CPU: with 4 taps 40 ms and 50 MB against 11 ms and 25 MB, with 31 taps 290 ms and 390
    # MB against 95 ms and 25 MB).
    if target_platform() == "gpu" and len(taps) <= _FEW_TAPS:
        d_taps = jnp.stack([d_tap(i) for i in range(len(taps))])
    else:
        d_taps = jax.lax.map(d_tap, jnp.arange(len(taps), dtype=jnp.int32))
    return d_x.astype(x.dtype), d_taps.astype(taps.dtype), None


_convolve.defvjp(lambda x, taps, runs, before: (_convolve(x, taps, runs, before), (x, taps, runs)), _convolved_backward)


def _multiply_channels(x_BxLxD: jax.Array, y_BxLxD: jax.Array) -> jax.Array:
    """Σ x y over all tokens, D float32; in two steps, since XLA's CPU backend adds up few rows at a time faster."""
    products_NxD = (x_BxLxD.astype(jnp.float32) * y_BxLxD.astype(jnp.float32)).reshape(-1, x_BxLxD.shape[-1])
    padded = jnp.pad(products_NxD, ((0, -len(products_NxD) % _SMALLEST_BLOCK), (0, 0)))
    return padded.reshape(-1, _SMALLEST_BLOCK, padded.shape[-1]).sum(axis=1).sum(axis=0)


def _shift(x_BxLx: jax.Array, offset: int) -> jax.Array:
    """Shifted by `offset` positions; zero outside the sequence, which is the run of padding."""
    length = x_BxLx.shape[1]
    offset = max(-length, min(offset, length))
    padding = [(0, 0), (max(-offset, 0), max(offset, 0))] + [(0, 0)] * (x_BxLx.ndim - 2)
    start = max(offset, 0)
    return jnp.pad(x_BxLx, padding)[:, start : start + length]


def _sum_taps(read_WxBxLxD: list[jax.Array], taps: jax.Array) -> jax.Array:
    """Σ of taps times their shifted inputs in float32; dtype of the inputs."""
    dtype = read_WxBxLxD[0].dtype
    if taps.ndim == 2:
        taps = taps.astype(jnp.float32)
        terms = [x.astype(jnp.float32) * taps[i][None, None] for i, x in enumerate(read_WxBxLxD)]
        return sum(terms[1:], start=terms[0]).astype(dtype)
    beside_BxLxWD = jnp.concatenate(read_WxBxLxD, axis=-1)
    kernel_WDxE = taps.astype(dtype).reshape(-1, taps.shape[-1])
    out_NxE = jnp.matmul(
        beside_BxLxWD.reshape(-1, kernel_WDxE.shape[0]), kernel_WDxE, preferred_element_type=jnp.float32
    )
    return out_NxE.reshape(*beside_BxLxWD.shape[:2], -1).astype(dtype)
