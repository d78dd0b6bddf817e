"""Divides the causal mask into rectangles of keys and queries that all see each other (divide and conquer).

Rectangles come from halving: in blocks of 2, 4, 8 … tokens the second half
sees the first. Documents are contiguous, so at most one of them crosses from the keys of a rectangle to its queries, or
from one block to the next; a sum that is carried along the blocks therefore belongs to one document.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Carried = TypeVar("Carried")  # a pytree of arrays


class Rectangles(NamedTuple):
    """Selections of keys and queries that see each other: (array, its axis of tokens) -> the array with axes (G, C)."""

    keys: Callable[[jax.Array, int], jax.Array]
    queries: Callable[[jax.Array, int], jax.Array]


def halves(size: int) -> Rectangles:
    """In blocks of 2·size tokens, the first half are keys and the second half queries."""

    def half(which: int) -> Callable[[jax.Array, int], jax.Array]:
        def select(x: jax.Array, axis: int) -> jax.Array:
            blocks = x.reshape(*x.shape[:axis], -1, 2, size, *x.shape[axis + 1 :])
            return jax.lax.index_in_dim(blocks, which, axis + 1, keepdims=False)

        return select

    return Rectangles(keys=half(0), queries=half(1))


def neighbours(size: int) -> Rectangles:
    """Each block of `size` tokens sees the block before it."""

    def blocks(x: jax.Array, axis: int) -> jax.Array:
        return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])

    def before(x: jax.Array, axis: int) -> jax.Array:
        y = jax.lax.slice_in_dim(blocks(x, axis), 0, x.shape[axis] // size - 1, axis=axis)
        return jnp.pad(y, [(1, 0) if i == axis else (0, 0) for i in range(y.ndim)])

    return Rectangles(keys=before, queries=blocks)


def crossing(runs_BxL: jax.Array, where: Rectangles) -> tuple[jax.Array, jax.Array]:
    """The keys and the queries, B×G×C each, of the document that crosses from keys to queries."""
    keys, queries = where.keys(runs_BxL, 1), where.queries(runs_BxL, 1)
    last = keys[..., -1:]
    return (keys == last) & (last > 0), (queries == last) & (last > 0)


def last_run_mask(runs_BxGxC: jax.Array) -> jax.Array:
    """The tokens of each block's last document, B×G×C: what the block carries to the next."""
    return (runs_BxGxC == runs_BxGxC[..., -1:]) & (runs_BxGxC > 0)


def carry_over_blocks(
    block_sums: Carried,
    runs_BxGxC: jax.Array,
    add: Callable[[Carried, Carried], Carried],
    nothing: Carried,
    initial: Carried | None,
    back: int = 1,
) -> tuple[Carried, jax.Array]:
    """Recurrence over blocks: for each block, the sum over the blocks `back` or more before it.

    Args:
        block_sums: sums over each block's last document; arrays are B×H×G×….
        runs_BxGxC: run of each token (see `Segments`), (B or 1)×….
        add: adds sums over disjoint tokens.
        nothing: the sum over no tokens; arrays are B×H×….
        initial: sum over the tokens before the sequence, which belong to its run 1; None: none.
        back: 1 or more.

    Returns:
        B×H×G×…; and the tokens that may use it, (B or 1)×G×C.
    """
    # The document that enters each block, and whether it goes on through the block.
    last_BxG = runs_BxGxC[..., -1]
    first_Bx1 = jnp.full_like(last_BxG[:, :1], 0 if initial is None else 1)
    before_BxG = jnp.concatenate([first_Bx1, last_BxG[:, :-1]], axis=1)
    start = nothing if initial is None else initial
    rows = jax.tree.leaves(start)[0].shape[0]
    goes_on_BxG = jnp.broadcast_to(before_BxG == last_BxG, (rows, last_BxG.shape[1]))

    def next_block(entering: Carried, block: tuple[Carried, jax.Array]) -> tuple[Carried, Carried]:
        block_sum, goes_on_B = block
        kept = jax.tree.map(
            lambda x, none: jnp.where(goes_on_B.reshape(-1, *[1] * (x.ndim - 1)), x, none), entering, nothing
        )
        return add(kept, block_sum), entering

    # A scan over the blocks carries the sum while the document goes on.
    by_block = (jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), block_sums), goes_on_BxG.T)
    _, entering = jax.lax.scan(next_block, start, by_block)
    entering = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), entering)
    # Each further block back delays the entering sums by one block.
    for _ in range(back - 1):
        entering = jax.tree.map(lambda x, s: jnp.concatenate([s[:, :, None], x[:, :, :-1]], axis=2), entering, start)
        before_BxG = jnp.concatenate([first_Bx1, before_BxG[:, :-1]], axis=1)
    return entering, (runs_BxGxC == before_BxG[..., None]) & (runs_BxGxC > 0)
