"""Sliding-window softmax attention, optionally dilated, and the merge of partial softmaxes (online softmax).

Time and memory grow with the tokens times the window, for any length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops import blocked_attention
from flash_lm.ops.blocked_attention import Settings
from flash_lm.ops.matmul import matmul
from flash_lm.ops.quadratic_attention import Bias, compute_scores
from flash_lm.ops.visibility import KeySpan

_TIMES = 8  # queries of a stretch over its reach: a quarter of the keys is stored twice, and none is visited more often


class Stretches(NamedTuple):
    """Cuts a long sequence with a sliding window into stretches that become rows of a batch.

    count: stretches per sequence.
    size: queries in a stretch.
    reach: keys on either side of its queries that a stretch has; less than `size`.
    ahead: keys of the sequence before its first query.
    """

    count: int
    size: int
    reach: int
    ahead: int

    def queries(self, x_BxHxLxK: jax.Array) -> jax.Array:
        """(B · count)×H×size×K, zeros at the end of the last."""
        return self._rows(_pad(x_BxHxLxK, 0, self.count * self.size))

    def keys(self, x_BxHxMxK: jax.Array) -> jax.Array:
        """(B · count)×H×(reach + size + reach)×K, zeros outside the sequence."""
        # Three shifted cuts of the padded sequence: keys before, beside and after the queries of each stretch.
        size, reach = self.size, self.reach
        row = _pad(x_BxHxMxK, reach - self.ahead, reach + (self.count + 1) * size)
        starts = (0, reach, reach + size)  # of what lies before the first stretch's queries, beside and after them
        before, same, after = (
            self._rows(jax.lax.slice_in_dim(row, start, start + self.count * size, axis=2)) for start in starts
        )
        return jnp.concatenate([before[:, :, :reach], same, after[:, :, :reach]], axis=2)

    def key_span(self, key_span: KeySpan, batch: int) -> KeySpan:
        """The keys of the stretch that its queries see, (B · count)×size."""

        def to_stretches(x_BxL: jax.Array) -> jax.Array:
            full = jnp.broadcast_to(x_BxL, (batch, x_BxL.shape[1]))
            row = jnp.pad(full, ((0, 0), (0, self.count * self.size - full.shape[1])))
            return row.reshape(batch * self.count, self.size)

        start = self.ahead - self.reach + self.size * jnp.arange(self.count, dtype=jnp.int32)
        start_Rx1 = jnp.tile(start, batch)[:, None]
        return KeySpan(*(to_stretches(x) - start_Rx1 for x in key_span))

    def merge(self, x_RxHxSxE: jax.Array, length: int) -> jax.Array:
        """The inverse of `queries`, for rows of `length` tokens."""
        _, heads, size, width = x_RxHxSxE.shape
        stretches = jnp.moveaxis(x_RxHxSxE.reshape(-1, self.count, heads, size, width), 1, 2)
        return stretches.reshape(-1, heads, self.count * size, width)[:, :, :length]

    def _rows(self, x_BxHxLxK: jax.Array) -> jax.Array:
        batch, heads, _, width = x_BxHxLxK.shape
        split = x_BxHxLxK.reshape(batch, heads, self.count, self.size, width)
        return jnp.moveaxis(split, 2, 1).reshape(batch * self.count, heads, self.size, width)


def choose_stretches(queries: int, keys: int, window: int) -> Stretches | None:
    """Stretches of a sequence whose last key belongs to its last query; None: it is too short for two stretches.

    Args:
        queries: number of queries.
        keys: number of keys, at least as many.
        window: queries see only keys fewer than this many tokens away.
    """
    block = blocked_attention.SMALLEST
    reach = -(-(window - 1) // block) * block
    wanted = _TIMES * max(reach, block)
    count = -(-queries // wanted)
    if count == 1:
        return None
    size = -(-queries // (count * block)) * block
    return Stretches(count, size, reach, keys - queries)


def _pad(x_BxHxLxK: jax.Array, before: int, total: int) -> jax.Array:
    """Pads with `before` zeros in front (negative: drops tokens), and with zeros behind up to `total`."""
    kept = jax.lax.slice_in_dim(x_BxHxLxK, max(-before, 0), x_BxHxLxK.shape[2], axis=2)
    before = max(before, 0)
    return jnp.pad(kept, ((0, 0), (0, 0), (before, total - before - kept.shape[2]), (0, 0)))


class SoftmaxPart(NamedTuple):
    """Softmax over some of the keys, with the log of the sum for merging with softmax over others (online softmax).

    out_BxHxLxE: the output; zeros where a query sees none of these keys.
    log_sum_BxHxL: logarithm of the sum of the exponentials of the scores, float32; hugely negative without visible
        keys.
    """

    out_BxHxLxE: jax.Array
    log_sum_BxHxL: jax.Array


def banded_softmax(
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    key_span: KeySpan,
    *,
    scale: float,
    window: int | None,
    bias: Bias | None = None,
) -> SoftmaxPart:
    """Blocked softmax attention: softmax(scale · q kᵀ + b) v over the keys that each query sees.

    Args:
        q_BxHxLxK: queries.
        k_BxHxMxK: keys, at indices 0 … M − 1.
        v_BxHxMxE: values.
        key_span: keys that each query sees; its window may differ by layer, as a traced number.
        scale: factor of q kᵀ.
        window: static; about as many keys as a query sees, for the size of blocks; None: all.
        bias: added to the scores, by the distance from query to key; see `blocked_attention.bias_of_heads`. It can hide
            keys, so windows may differ by head.
    """
    if q_BxHxLxK.shape[2] > blocked_attention.SMALLEST:
        no_divisor = jnp.ones(key_span.first_BxL.shape, jnp.float32)
        settings = Settings("softmax", scale)
        return SoftmaxPart(
            *blocked_attention.attend(q_BxHxLxK, k_BxHxMxK, v_BxHxMxE, key_span, no_divisor, settings, bias, window)
        )
    return softmax_of_scores(*compute_scores(q_BxHxLxK, k_BxHxMxK, key_span, scale, bias), v_BxHxMxE)


def windowed_softmax(
    q_BxHxLxK: jax.Array, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, key_span: KeySpan, *, scale: float, window: int
) -> SoftmaxPart:
    """Sliding-window softmax: `banded_softmax` on stretches, for a window that is not longer than `window`.

    The last key must belong to the last query, as in a sequence and in a ring followed by new tokens.
    """
    batch, _, length, _ = q_BxHxLxK.shape
    # A long sequence becomes a batch of stretches, so that time grows with length times window.
    cut = choose_stretches(length, k_BxHxMxK.shape[2], window)
    if cut is None:
        return banded_softmax(q_BxHxLxK, k_BxHxMxK, v_BxHxMxE, key_span, scale=scale, window=window)
    q, k, v, seen = cut.queries(q_BxHxLxK), cut.keys(k_BxHxMxK), cut.keys(v_BxHxMxE), cut.key_span(key_span, batch)
    out, log_sum = banded_softmax(q, k, v, seen, scale=scale, window=window)
    return SoftmaxPart(cut.merge(out, length), cut.merge(log_sum[..., None], length)[..., 0])


def softmax_of_scores(scores_BxHxLxM: jax.Array, visible: jax.Array, v_BxHxMxE: jax.Array) -> SoftmaxPart:
    """Softmax attention from all scores at once, float32; `visible` has a shape that broadcasts to theirs."""
    # The maximum has no gradient, and a floor, so that a query without visible keys gets zeros.
    hidden = jnp.where(visible, scores_BxHxLxM, blocked_attention.HIDDEN)
    top_BxHxLx1 = jax.lax.stop_gradient(jnp.maximum(hidden.max(axis=-1, keepdims=True), blocked_attention.LOWEST))
    weights_BxHxLxM = jnp.exp(hidden - top_BxHxLx1)
    total_BxHxLx1 = weights_BxHxLxM.sum(axis=-1, keepdims=True)
    total_BxHxLx1 = jnp.where(total_BxHxLx1 > 0, total_BxHxLx1, 1)  # for a query that sees nothing
    mixed = matmul(weights_BxHxLxM.astype(v_BxHxMxE.dtype), v_BxHxMxE) / total_BxHxLx1
    return SoftmaxPart(mixed.astype(v_BxHxMxE.dtype), (top_BxHxLx1 + jnp.log(total_BxHxLx1))[..., 0])


def merge_softmaxes(parts: list[SoftmaxPart]) -> jax.Array:
    """Merges softmaxes over disjoint keys by their logs of sums: B×H×L×E, dtype of the outputs."""
    # The share of a part is its sum of exponentials over all: a softmax of the logs of sums.
    sums_PxBxHxL = jnp.stack([part.log_sum_BxHxL for part in parts])
    share_PxBxHxL = jax.nn.softmax(sums_PxBxHxL, axis=0)
    out_PxBxHxLxE = jnp.stack([part.out_BxHxLxE for part in parts])
    return (share_PxBxHxL[..., None] * out_PxBxHxLxE.astype(jnp.float32)).sum(axis=0).astype(out_PxBxHxLxE.dtype)


def fold_dilation(x_BxHxLxK: jax.Array, dilation: int) -> jax.Array:
    """Dilated windows: every `dilation`-th token becomes a row, (B · dilation)×H×⌈L / dilation⌉×K, zeros at the end.

    A dilated window is a plain window on these rows.
    """
    batch, heads, length, width = x_BxHxLxK.shape
    padded = jnp.pad(x_BxHxLxK, ((0, 0), (0, 0), (0, -length % dilation), (0, 0)))
    split = padded.reshape(batch, heads, -1, dilation, width)
    return jnp.moveaxis(split, 3, 1).reshape(batch * dilation, heads, -1, width)


def unfold_dilation(x_BxHxLxK: jax.Array, dilation: int, length: int) -> jax.Array:
    """The inverse of `fold_dilation`, for rows of `length` tokens."""
    rows, heads, short, width = x_BxHxLxK.shape
    split = jnp.moveaxis(x_BxHxLxK.reshape(-1, dilation, heads, short, width), 1, 3)
    return split.reshape(rows // dilation, heads, short * dilation, width)[:, :, :length]


def fold_key_span(key_span: KeySpan, dilation: int, batch: int) -> KeySpan:
    """The keys that queries of `fold_dilation` rows see in their row.

    Args:
        key_span: of the full sequences; the index of the first query must be a multiple of `dilation`, and those of
            adjacent queries differ by one.
        dilation: distance from one token of a folded row to the next.
        batch: B.
    """

    def fold(x_BxL: jax.Array) -> jax.Array:
        x_BxL = jnp.broadcast_to(x_BxL, (batch, x_BxL.shape[1]))
        padded = jnp.pad(x_BxL, ((0, 0), (0, -x_BxL.shape[1] % dilation)))
        return jnp.swapaxes(padded.reshape(batch, -1, dilation), 1, 2).reshape(batch * dilation, -1)

    first, stop = fold(key_span.first_BxL), fold(key_span.stop_BxL)
    offset = jnp.tile(jnp.arange(dilation, dtype=jnp.int32), batch)[:, None]
    ends = (-((offset - end) // dilation) for end in (first, stop))  # ⌈(end − offset) / dilation⌉
    return KeySpan(fold(key_span.index_BxL) // dilation, *ends)
