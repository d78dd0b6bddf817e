"""Products of decays e^(b_i − b_j) from running sums of logarithms, exact for near tokens after any decay.

A weight is exp(b_i − b_j), where b are running sums. If b is large, the difference of two near ones has lost its last
digits. So each logarithm is split into a multiple of 2⁻⁹, whose sums float32 holds exactly, and a small rest.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.matmul import sum_axis

LOWEST = -80.0  # logarithm of a decay to zero: float32 ends at e⁻⁸⁷
_GRAIN = 2.0**-9  # sums of 2⁹ numbers down to LOWEST have at most 24 bits


class Running(NamedTuple):
    """Sums of logarithms along the last axis, up to and including each index: of multiples of 2⁻⁹, and of the rest."""

    coarse: jax.Array
    fine: jax.Array

    def at(self, select: Callable[[jax.Array], jax.Array]) -> "Running":
        """Applies a selection or a change of shape to both parts."""
        return Running(select(self.coarse), select(self.fine))

    def total(self) -> jax.Array:
        """The sums as one number each."""
        return self.coarse + self.fine


def running(log_decay_xC: jax.Array, runs_xC: jax.Array | None = None) -> Running:
    """The running sums of logarithms, which are not positive, float32; those below LOWEST count as that.

    Args:
        log_decay_xC: (…, C).
        runs_xC: the sums start again where this changes, so that not even their rounding depends on what was before; as
            many dimensions, of the same size or 1; None: one sum.
    """
    # The coarse part has no gradient: it is a constant shift of the fine part.
    bounded = jnp.maximum(log_decay_xC.astype(jnp.float32), LOWEST)
    coarse = jax.lax.stop_gradient(jnp.round(bounded / _GRAIN) * _GRAIN)
    return Running(*(_sum_exactly(x, runs_xC) for x in (coarse, bounded - coarse)))


@jax.checkpoint
def _sum_exactly(x_xC: jax.Array, runs_xC: jax.Array | None) -> jax.Array:
    """Running sums as matrix products, since XLA's CPU backend is slow at cumsum; the triangle is not kept."""
    size = x_xC.shape[-1]
    counts = jnp.tri(size, dtype=bool).T.reshape(*[1] * (x_xC.ndim - 1), size, size)
    if runs_xC is not None:
        counts &= runs_xC[..., :, None] == runs_xC[..., None, :]
    return jnp.matmul(x_xC[..., None, :], counts.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)[..., 0, :]


@jax.custom_vjp
def decay_between(later: Running, earlier: Running, where: jax.Array) -> jax.Array:
    """Decay e^(b_later − b_earlier), the product of decays after `earlier` up to `later`, float32; 0 except `where`.

    Arrays have as many dimensions, of the same size or 1.
    """
    log = (later.coarse - earlier.coarse) + (later.fine - earlier.fine)
    return jnp.where(where, jnp.exp(jnp.where(where, log, 0)), 0)


def _decay_forward(later: Running, earlier: Running, where: jax.Array):
    return decay_between(later, earlier, where), (later, earlier, where)


def _decay_backward(kept: tuple[Running, Running, jax.Array], d_out: jax.Array):
    later, earlier, where = kept
    d_log = d_out * decay_between(later, earlier, where)
    # The coarse sums have no derivative.
    d_later, d_earlier = (Running(jnp.zeros_like(x.coarse), _like(d_log, x.fine)) for x in (later, earlier))
    return d_later, d_earlier.at(jnp.negative), None


decay_between.defvjp(_decay_forward, _decay_backward)


def _like(x: jax.Array, other: jax.Array) -> jax.Array:
    """The sum of x over the dimensions that are 1 in the other."""
    for axis in (-1, -2):
        if other.shape[axis] == 1 != x.shape[axis]:
            x = sum_axis(x, axis)
    alike = tuple(i for i, size in enumerate(other.shape) if size == 1 != x.shape[i])
    return x.sum(axis=alike, keepdims=True)
