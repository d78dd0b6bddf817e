"""AFT as matrix products exp(w) · [exp(K) ⊙ V, exp(K)] without a maximum, where float32 can hold the exponentials.

No maximum is subtracted, so keys and values that a query does not see do not change a bit of its sums, as long as they
are finite. `ops.aft` has the form for any size.
"""

import jax
import jax.numpy as jnp

from flash_lm.ops.aft_bias import PairBias
from flash_lm.ops.matmul import matmul
from flash_lm.ops.rectangles import Rectangles, carry_over_blocks, last_run_mask, neighbours

# A query sees itself, so its denominator is at least exp(-50); and sums over any sequence stay below float32's maximum.
SMALLEST_KEY, LARGEST_KEY, LARGEST_W, LARGEST_VALUE = -30.0, 40.0, 20.0, 1e6
_BLOCK = 64  # tokens in a block if the window is not larger
_PARTS = 8  # parts of a row if all pairs have a w
_LONGEST = 2048  # tokens in such a row: XLA holds the weights of several parts, which grow quadratically


def fits(k: jax.Array, v: jax.Array, bias: PairBias | None) -> jax.Array:
    """Whether all exponentials and values, including padding, have moderate size, a bool."""
    if bias is not None and bias.window is None and k.shape[2] > _LONGEST:
        return jnp.zeros((), bool)
    good = (k.min() >= SMALLEST_KEY) & (k.max() <= LARGEST_KEY) & (jnp.abs(v).max() <= LARGEST_VALUE)
    return good if bias is None else good & (bias.bound() <= LARGEST_W)


def causal_products(
    k: jax.Array, v: jax.Array, runs_BxL: jax.Array, bias: PairBias | None, *, include_self: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Numerator and denominator of each token over the visible keys up to itself.

    Args:
        k: B×H×L×M float32, M = E or 1.
        v: B×H×L×E float32.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        bias: w; None: zero.
        include_self: whether a token sees itself.

    Returns:
        B×H×L×E and B×H×L×M float32.
    """
    # Pad to full blocks, and take all exponentials at once.
    length = k.shape[2]
    size = _block(bias, length)
    pad = lambda x, axis: jnp.pad(x, [(0, -length % size if i == axis else 0) for i in range(x.ndim)])
    weight = jnp.exp(k)
    # Not joined into one array, whose parts would be on other devices than their channels.
    summed, runs = (pad(weight * v, 2), pad(weight, 2)), pad(runs_BxL, 1)
    bias = bias.over_tokens(lambda x: pad(x, 1)) if bias is not None else None
    index = jnp.arange(runs.shape[1], dtype=jnp.int32)[None]

    def near(where: Rectangles) -> list[jax.Array]:
        """B×H×G×C×…: contributions of the rectangles' keys to their queries."""
        runs_q, index_q = (where.queries(y, 1)[..., None] for y in (runs, index))
        runs_k, index_k = (where.keys(y, 1)[..., None, :] for y in (runs, index))
        visible = (runs_q == runs_k) & (runs_q > 0) & (index_k <= index_q if include_self else index_k < index_q)

        @jax.checkpoint  # recompute the weights
        def products(summed: tuple[jax.Array, jax.Array], bias: PairBias | None) -> list[jax.Array]:
            a = jnp.where(visible[:, None], 1.0 if bias is None else jnp.exp(bias.tile(where)), 0.0)
            keys = [where.keys(x, 2) for x in summed]
            return [matmul(jnp.broadcast_to(a, (*x.shape[:3], *a.shape[3:])), x) for x in keys]

        return products(summed, bias)

    if bias is not None and bias.window is None:
        # AFT-full: each block of queries with all keys up to its end.
        parts = [near(_until(start, size)) for start in range(0, runs.shape[1], size)]
        sums = [jnp.concatenate([part[:, :, 0] for part in of_all], axis=2) for of_all in zip(*parts, strict=True)]
    else:
        # Else each block with itself and, if there is a bias, the block before; older tokens as one sum per block.
        blocks = neighbours(size).queries
        where = Rectangles(keys=blocks if bias is None else _append_last(size), queries=blocks)
        sums = near(where)
        if size < runs.shape[1]:
            back = 1 if bias is None else 2
            sums = [x + _far(y, runs, size, back) for x, y in zip(sums, summed, strict=True)]
        sums = [x.reshape(y.shape) for x, y in zip(sums, summed, strict=True)]
    numerator, denominator = (x[:, :, :length] for x in sums)
    return numerator, denominator


def _block(bias: PairBias | None, length: int) -> int:
    """Tokens in a block: no fewer than the window; if all pairs have a w, a part of the sequence."""
    least = _BLOCK if bias is None else max(_BLOCK, -(-length // _PARTS) if bias.window is None else bias.window)
    return min(1 << (least - 1).bit_length(), 1 << (length - 1).bit_length())


def _until(start: int, size: int) -> Rectangles:
    """One rectangle: the queries of a block and all keys up to its end."""
    cut = lambda first: lambda x, axis: jnp.expand_dims(jax.lax.slice_in_dim(x, first, start + size, axis=axis), axis)
    return Rectangles(keys=cut(0), queries=cut(start))


def _append_last(size: int):
    """The keys of each block and of the block before it."""
    where = neighbours(size)
    return lambda x, axis: jnp.concatenate([where.keys(x, axis), where.queries(x, axis)], axis=axis + 1)


def _far(x: jax.Array, runs: jax.Array, size: int, back: int) -> jax.Array:
    """Sums with w = 0 over the document of the query, in the blocks `back` or more before its block."""
    blocks = neighbours(size).queries
    runs_BxGxC = blocks(runs, 1)
    block_sums = jnp.where(last_run_mask(runs_BxGxC)[:, None, :, :, None], blocks(x, 2), 0).sum(axis=3)
    far, visible = carry_over_blocks(block_sums, runs_BxGxC, jnp.add, jnp.zeros_like(block_sums[:, :, 0]), None, back)
    return jnp.where(visible[:, None, :, :, None], far[:, :, :, None], 0)
