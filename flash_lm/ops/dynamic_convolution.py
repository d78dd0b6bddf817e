"""Dynamic convolution, with taps per token and head: y_t = Σ_i w_ti x_(t + i − before), for all channels of a head.

"Pay Less Attention with Lightweight and Dynamic Convolutions", Wu et al. 2019, section 4.
"""

import jax
import jax.numpy as jnp

from flash_lm.ops.convolution import last_inputs, reach, seen_by_taps
from flash_lm.ops.matmul import matmul

_SMALLEST_BLOCK = 32  # tokens


def softmax_of_taps(scores_BxLxHxW: jax.Array, taps: jax.Array, *, causal: bool) -> jax.Array:
    """Softmax over the `taps` tokens nearest to a token; zero at all others.

    Args:
        scores_BxLxHxW: a number for each of W taps, in the order of the tokens that they read.
        taps: how many of them are used, 1 … W, int32; it may be traced.
        causal: the last ones, up to that of the token itself; otherwise those around it.

    Returns:
        B×L×H×W float32. Taps that read no token keep their share.
    """
    count = scores_BxLxHxW.shape[-1]
    tap_offset_W = jnp.arange(count, dtype=jnp.int32) - reach(count, causal)[0]
    before, after = reach(taps, causal)
    used_W = (tap_offset_W >= -before) & (tap_offset_W <= after)
    # Taps of a stack of layers have one width; a layer uses those nearest to the token.
    scores = jnp.where(used_W[None, None, None], scores_BxLxHxW.astype(jnp.float32), -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)


def dynamic_convolution(
    x_BxLxD: jax.Array, weights_BxLxHxW: jax.Array, runs_BxL: jax.Array, *, causal: bool
) -> jax.Array:
    """Dynamic convolution Σ_i w_ti x_(t + i − before) over the tokens of the document of t.

    Args:
        x_BxLxD: the input, D / H channels for each head.
        weights_BxLxHxW: taps of each token and head, or (1, 1, H, W): the same for all tokens.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        causal: read no token after t.

    Returns:
        B×L×D, dtype of x. Padding gets zeros.
    """
    count, length = weights_BxLxHxW.shape[-1], x_BxLxD.shape[1]
    before, after = reach(count, causal)
    real_BxL = jnp.broadcast_to(runs_BxL > 0, x_BxLxD.shape[:2])
    x = jnp.where(real_BxL[..., None], x_BxLxD, 0)  # a product with a weight of zero must be zero
    seen_BxLxW = seen_by_taps(runs_BxL, count, causal=causal)
    weights = jnp.where(seen_BxLxW[:, :, None], weights_BxLxHxW, 0)
    weights = jnp.broadcast_to(weights, (len(x), length, *weights.shape[2:]))
    return _apply_taps(jnp.pad(x, ((0, 0), (before, after), (0, 0))), weights)


def continue_dynamic_convolution(
    x_BxLxD: jax.Array, weights_BxLxHxW: jax.Array, last_BxVxD: jax.Array, lengths_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Causal dynamic convolution that continues each sequence from its last inputs (decode state).

    Args:
        x_BxLxD: new tokens, padded on the right.
        weights_BxLxHxW: as for `dynamic_convolution`.
        last_BxVxD: the V = W − 1 tokens before these, oldest first; zeros before the first token of all.
        lengths_B: number of new tokens, 0 … L.

    Returns:
        B×L×D, meaningless at padding; and the last W − 1 tokens after the new ones.
    """
    length = x_BxLxD.shape[1]
    real_BxL = jnp.arange(length, dtype=jnp.int32)[None] < lengths_B[:, None]
    x = jnp.where(real_BxL[..., None], x_BxLxD, 0)  # beyond the last position it may be NaN
    weights = jnp.where(real_BxL[..., None, None], weights_BxLxHxW, 0)
    joined_BxTxD = jnp.concatenate([last_BxVxD.astype(x.dtype), x], axis=1)
    return _apply_taps(joined_BxTxD, weights), last_inputs(joined_BxTxD, lengths_B, last_BxVxD)


def _apply_taps(read_BxTxD: jax.Array, weights_BxLxHxW: jax.Array) -> jax.Array:
    """Σ_i w_ti r_(t + i) with T = L + W − 1, summed in float32; dtype of r.

    A block of tokens is a product of a band matrix, which holds their weights, with what it reads. The derivative of W
    shifted multiply-adds would be ten times as slow on a CPU and hold W arrays (4×1024×384, 31 taps: 330 ms and 380 MB
    against 30 ms and 25 MB; with a custom derivative 270 ms).
    """
    # Blocks of at least as many tokens as taps, so a block reads only itself and the next one.
    (batch, length, heads, count), width = weights_BxLxHxW.shape, read_BxTxD.shape[-1]
    size = min(length, max(_SMALLEST_BLOCK, count - 1))
    blocks, columns = -(-length // size), size + count - 1

    def cut(x_BxTxHx: jax.Array) -> jax.Array:
        blocks_BxGxCxHx = x_BxTxHx[:, : blocks * size].reshape(batch, blocks, size, heads, -1)
        return jnp.swapaxes(blocks_BxGxCxHx, 2, 3)

    filler = ((0, 0), (0, blocks * size - length))
    weights_BxGxHxCxW = cut(jnp.pad(weights_BxLxHxW, (*filler, (0, 0), (0, 0)))).astype(read_BxTxD.dtype)
    # Band matrix by reshaping: each row starts one column further right than the one before.
    longer = jnp.pad(weights_BxGxHxCxW, [(0, 0)] * 4 + [(0, columns + 1 - count)])
    band_BxGxHxCxJ = longer.reshape(batch, blocks, heads, -1)[..., : size * columns].reshape(
        batch, blocks, heads, size, columns
    )
    read_BxTxHxE = jnp.pad(read_BxTxD, (*filler, (0, 0))).reshape(batch, -1, heads, width // heads)
    block_BxGxHxCxE = cut(read_BxTxHxE)
    # Each block reads its tokens and the first W − 1 of the next.
    after_BxGxHxVxE = jnp.swapaxes(read_BxTxHxE[:, None, blocks * size :], 2, 3)  # what the last block reads
    if blocks > 1:
        after_BxGxHxVxE = jnp.concatenate([block_BxGxHxCxE[:, 1:, :, : count - 1], after_BxGxHxVxE], axis=1)
    out_BxGxHxCxE = matmul(band_BxGxHxCxJ, jnp.concatenate([block_BxGxHxCxE, after_BxGxHxVxE], axis=3))
    out_BxTxD = jnp.swapaxes(out_BxGxHxCxE, 2, 3).reshape(batch, -1, width)
    return out_BxTxD[:, :length].astype(read_BxTxD.dtype)
