"""WKV of RWKV-4: mean of values, weights e^k that decay by e^−w per token and channel (Peng et al. 2023, eq. 14–16).

Sums are relative to a maximum (online softmax), so keys of any size and sequences of any length do not overflow. A
scan over the tokens of a chunk runs in all chunks at once; then a scan over the chunks. All is float32, and starts
again with each document.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.chunks import entering_runs, from_chunks, run_chunks, to_chunks

_NOTHING = -1e30  # top of an empty sum; a difference of two such is 0 where that of −∞ is NaN


class Sums(NamedTuple):
    """Σ e^(k_i − decay) v_i and the same without v, both divided by e^top; …×D each, float32."""

    values: jax.Array
    weights: jax.Array
    top: jax.Array

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> "Sums":
        """Sums over no tokens."""
        return cls(jnp.zeros(shape), jnp.zeros(shape), jnp.full(shape, _NOTHING))

    @classmethod
    def of(cls, k: jax.Array, v: jax.Array) -> "Sums":
        """Sums over one token each."""
        return cls(v, jnp.ones_like(v), k)

    def decay(self, log: jax.Array) -> "Sums":
        """After a decay, whose logarithm is not positive."""
        return self._replace(top=self.top + log)

    def plus(self, other: "Sums") -> "Sums":
        """Merges sums over disjoint tokens (online softmax)."""
        top = jax.lax.stop_gradient(jnp.maximum(self.top, other.top))  # any would do
        one, two = jnp.exp(self.top - top), jnp.exp(other.top - top)
        return Sums(one * self.values + two * other.values, one * self.weights + two * other.weights, top)

    def where(self, condition: jax.Array) -> "Sums":
        """The sums where the condition holds, else empty sums."""
        return Sums(*(jnp.where(condition, x, none) for x, none in zip(self, (0, 0, _NOTHING), strict=True)))

    def at(self, select: Callable[[jax.Array], jax.Array]) -> "Sums":
        """Applies a selection or a change of shape to all arrays."""
        return Sums(*(select(x) for x in self))

    def mean(self) -> jax.Array:
        """Σ weight v / Σ weight; zero of no tokens."""
        return self.values / jnp.where(self.weights > 0, self.weights, 1)


def wkv(
    k_BxLxD: jax.Array,
    v_BxLxD: jax.Array,
    rate_D: jax.Array,
    bonus_D: jax.Array,
    runs_BxL: jax.Array,
    *,
    chunk_size: int,
    causal: bool,
) -> jax.Array:
    """WKV: the mean of the current value, with weight e^(k + u), and of others, with e^(k − (distance − 1) w).

    Args:
        k_BxLxD: keys.
        v_BxLxD: values.
        rate_D: w, positive, float32.
        bonus_D: u, float32.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        chunk_size: C.
        causal: the others are the tokens before, of the same document; else those after, too.

    Returns:
        B×L×D, dtype of v. Padding gets zeros.
    """
    k, v = (x.astype(jnp.float32) for x in (k_BxLxD, v_BxLxD))
    runs_BxL = jnp.broadcast_to(runs_BxL, k.shape[:2])
    sums = Sums.of(k + bonus_D[None, None], v).plus(_before(k, v, rate_D, runs_BxL, chunk_size))
    if not causal:
        # Bidirectional: the tokens after each one are those before it in the reversed sequence.
        k, v, runs = (jnp.flip(x, axis=1) for x in (k, v, runs_BxL))
        sums = sums.plus(_before(k, v, rate_D, runs, chunk_size).at(lambda x: jnp.flip(x, axis=1)))
    return jnp.where((runs_BxL > 0)[..., None], sums.mean(), 0).astype(v_BxLxD.dtype)


def prefill_wkv(
    k_BxLxD: jax.Array,
    v_BxLxD: jax.Array,
    rate_D: jax.Array,
    bonus_D: jax.Array,
    state: Sums,
    real_BxL: jax.Array,
    *,
    chunk_size: int,
) -> tuple[jax.Array, Sums]:
    """`wkv` for tokens that continue a state.

    Args:
        k_BxLxD: keys.
        v_BxLxD: values.
        rate_D: w, positive, float32.
        bonus_D: u, float32.
        state: the sum over the tokens before these, as the next one sees it, B×D.
        real_BxL: which tokens are not padding; padding is at the end.
        chunk_size: C.

    Returns:
        B×L×D, dtype of v; and the sum after the real tokens.
    """
    # Beyond the last position keys may be NaN.
    k, v = (jnp.where(real_BxL[..., None], x.astype(jnp.float32), 0) for x in (k_BxLxD, v_BxLxD))
    before = _before(k, v, rate_D, jnp.ones_like(real_BxL, jnp.int32), chunk_size, state)
    out = Sums.of(k + bonus_D[None, None], v).plus(before).mean()
    count_Bx1 = real_BxL.sum(axis=1, dtype=jnp.int32)[:, None]
    last = lambda x: jnp.take_along_axis(x, jnp.maximum(count_Bx1 - 1, 0)[..., None], axis=1)[:, 0]
    after = before.at(last).decay(-rate_D[None]).plus(Sums.of(last(k), last(v)))
    kept = Sums(*(jnp.where(count_Bx1 > 0, new, old) for new, old in zip(after, state, strict=True)))
    return out.astype(v_BxLxD.dtype), kept


def _before(
    k: jax.Array, v: jax.Array, rate_D: jax.Array, runs_BxL: jax.Array, chunk_size: int, initial: Sums | None = None
) -> Sums:
    """The sums over the tokens before each one, B×L×D; `initial` enters the first run."""
    # Inside the chunks: a scan over their tokens, all chunks at once.
    length, size = k.shape[1], min(chunk_size, k.shape[1])
    runs, k, v = run_chunks(runs_BxL, size), to_chunks(k, size), to_chunks(v, size)
    by_token = lambda x: jnp.moveaxis(x, 2, 0)  # one place of all chunks after another
    log = -rate_D[None, None]
    start = Sums.nothing(k[:, :, 0].shape)

    def next_token(sums: Sums, token: tuple[jax.Array, ...]) -> tuple[Sums, Sums]:
        k, v, goes_on = token
        previous = sums.where(goes_on[..., None])
        return previous.decay(log).plus(Sums.of(k, v)), previous

    goes_on_BxGxC = jnp.pad(runs[:, :, 1:] == runs[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    ends, inside = jax.lax.scan(jax.checkpoint(next_token), start, (by_token(k), by_token(v), by_token(goes_on_BxGxC)))
    # Across chunks: a scan over the sums at the ends of chunks.
    entering_BxG, last_BxG = entering_runs(runs[:, :, -1]), runs[:, :, -1]

    def next_chunk(sums: Sums, chunk: tuple[Sums, jax.Array]) -> tuple[Sums, Sums]:
        end, goes_on_B = chunk
        return sums.decay(-size * rate_D[None]).where(goes_on_B[:, None]).plus(end), sums

    chunks = lambda x: jnp.moveaxis(x, 1, 0)
    initial = Sums.nothing(k[:, 0, 0].shape) if initial is None else initial
    _, entering = jax.lax.scan(next_chunk, initial, (ends.at(chunks), chunks(entering_BxG == last_BxG)))
    # The entering sum decays on to each token of its document.
    passed_Cx1 = jnp.arange(size, dtype=jnp.float32)[:, None]
    seen = (runs == entering_BxG[..., None])[..., None]
    passed_log = -(passed_Cx1 * rate_D[None])[None, None]
    from_before = entering.at(lambda x: jnp.moveaxis(x, 0, 1)[:, :, None]).decay(passed_log)
    before = inside.at(lambda x: jnp.moveaxis(x, 0, 2)).plus(from_before.where(seen))
    return before.at(lambda x: from_chunks(x, length))
