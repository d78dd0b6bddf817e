"""Online softmax: weighted means with exponential weights, as numerator and denominator relative to a maximum.

With a maximum over keys that a query does not see, all its weights may underflow. So sums are computed over rectangles
of keys and queries that all see each other, and added after rescaling to a common maximum. Sums are float32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from flash_lm.ops.rectangles import Rectangles, halves

_SUMS = "stable_sums"
NOTHING = -1e30  # the maximum over no keys: finite, so that the difference of two is not NaN


class Sums(NamedTuple):
    """Σ weight ⊙ V / exp(max), Σ weight / exp(max) and max, over some keys; the maxima have no derivative.

    The weights of a head have width M: E, one per channel, or 1, shared by all channels.
    """

    numerator_BxHxLxE: jax.Array
    denominator_BxHxLxM: jax.Array
    max_BxHxLxM: jax.Array


def add(a: Sums, b: Sums) -> Sums:
    """Merges online-softmax sums over disjoint keys."""
    top = jnp.maximum(a.max_BxHxLxM, b.max_BxHxLxM)
    scale_a, scale_b = jnp.exp(a.max_BxHxLxM - top), jnp.exp(b.max_BxHxLxM - top)
    return Sums(
        a.numerator_BxHxLxE * scale_a + b.numerator_BxHxLxE * scale_b,
        a.denominator_BxHxLxM * scale_a + b.denominator_BxHxLxM * scale_b,
        top,
    )


def without_max(sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Numerator and denominator; 0 and 1 for a query without a visible key."""
    seen = ~(sums.max_BxHxLxM <= NOTHING / 2)  # a NaN key counts as seen
    numerator = jnp.where(seen, sums.numerator_BxHxLxE, 0)
    return numerator, jnp.where(seen, sums.denominator_BxHxLxM, 1)


def quotient(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Numerator / denominator with a derivative that float32 can represent for any denominator."""
    # The usual derivative divides by the squared denominator, which may underflow; with a denominator of 1 it cannot.
    scale = jax.lax.stop_gradient(1 / denominator)
    return numerator * scale / (denominator * scale)


def mean_by_either(moderate: Callable, product_form: Callable, stable_form: Callable, *arrays: Any) -> jax.Array:
    """The quotient of plain products if all numbers are moderate, otherwise that of the stable form.

    Args:
        moderate: arrays -> whether they are moderate, a bool.
        product_form: arrays -> numerator and denominator.
        stable_form: the same, for arrays of any size.
        arrays: the differentiated inputs.
    """

    # The derivative needs the sums, and recomputes everything else.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_SUMS))
    def mean(*arrays: Any) -> jax.Array:
        forms = (jax.checkpoint(product_form), jax.checkpoint(stable_form))
        return quotient(*(checkpoint_name(x, _SUMS) for x in jax.lax.cond(moderate(*arrays), *forms, *arrays)))

    return mean(*arrays)


def ratio(sums: Sums) -> jax.Array:
    """B×H×L×E; a query without a visible key gets zeros."""
    return quotient(*without_max(sums))


def nothing(v: jax.Array, width: int) -> Sums:
    """The sums over no keys for values of this shape and weights of this width."""
    top = jnp.full((*v.shape[:-1], width), NOTHING, jnp.float32)
    return Sums(jnp.zeros(v.shape, jnp.float32), jnp.zeros_like(top), top)


def only(sums: Sums, visible: jax.Array) -> Sums:
    """The sums, masked for queries that do not see the keys; (B or 1)×G×C beside B×H×G×C×… sums."""
    seen = visible[:, None, :, :, None]
    empty = Sums(jnp.float32(0), jnp.float32(0), jnp.float32(NOTHING))
    return Sums(*(jnp.where(seen, x, none) for x, none in zip(sums, empty, strict=True)))


def exponentials(x: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp(x − max), zero where not visible, and the maximum over axis −2, which has no derivative."""
    hidden = jnp.where(visible, x, NOTHING)
    top = jax.lax.stop_gradient(hidden.max(axis=-2, keepdims=True))
    return jnp.where(visible, jnp.exp(hidden - top), 0), top


def sum_over_blocks(sums: Sums, block: int, look: Callable[[Rectangles], Sums]) -> Sums:
    """Divide and conquer: adds to the sums of each token those over the tokens before it in its block.

    Args:
        sums: sums of all tokens; the length is a multiple of `block`.
        block: a power of two.
        look: returns the sums of the queries of rectangles over their keys, B×H×G×C×….
    """
    size = 1
    while size < block:
        where = halves(size)
        first, second = (jax.tree.map(lambda x, part=part: part(x, 2), sums) for part in where)
        second = add(second, look(where))
        sums = jax.tree.map(lambda a, b: jnp.stack([a, b], 3).reshape(*a.shape[:2], -1, a.shape[-1]), first, second)
        size *= 2
    return sums


def add_to_blocks(sums: Sums, others: Sums) -> Sums:
    """Adds sums of tokens, B×H×L×…, and sums of the same tokens in blocks, B×H×G×C×…."""
    size = others.numerator_BxHxLxE.shape[3]
    blocks = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, size, x.shape[-1]), sums)
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, x.shape[-1]), add(blocks, others))
