"""Long rows of a window's attention as several shorter ones, side by side in the batch.

A loop over a row's blocks has little work in each step if the row is alone in its batch. Cut into stretches, each with
the keys that its window reaches, the same tokens take as long as so many short rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops import blocked_attention
from flash_lm.ops.visibility import Sight

_TIMES = 8  # a stretch's queries over its reach: a quarter of the keys is held twice, and none is visited more often


class Stretches(NamedTuple):
    """How rows of queries are cut.

    count: stretches a row.
    size: queries in a stretch.
    reach: keys on either side of its queries that a stretch has; less than `size`.
    ahead: keys of the row before its first query.
    """

    count: int
    size: int
    reach: int
    ahead: int

    def queries(self, x_BxHxLxK: jax.Array) -> jax.Array:
        """(B · count)×H×size×K, zeros at the end of the last."""
        return self._rows(_padded(x_BxHxLxK, 0, self.count * self.size))

    def keys(self, x_BxHxMxK: jax.Array) -> jax.Array:
        """(B · count)×H×(reach + size + reach)×K, zeros where the row has no key."""
        size, reach = self.size, self.reach
        row = _padded(x_BxHxMxK, reach - self.ahead, reach + (self.count + 1) * size)
        starts = (0, reach, reach + size)  # of what lies before the first stretch's queries, beside and after them
        before, own, after = (
            self._rows(jax.lax.slice_in_dim(row, start, start + self.count * size, axis=2)) for start in starts
        )
        return jnp.concatenate([before[:, :, :reach], own, after[:, :, :reach]], axis=2)

    def sight(self, sight: Sight, batch: int) -> Sight:
        """What the queries see of their own stretch's keys, (B · count)×size."""

        def of_rows(x_BxL: jax.Array) -> jax.Array:
            whole = jnp.broadcast_to(x_BxL, (batch, x_BxL.shape[1]))
            row = jnp.pad(whole, ((0, 0), (0, self.count * self.size - whole.shape[1])))
            return row.reshape(batch * self.count, self.size)

        start = self.ahead - self.reach + self.size * jnp.arange(self.count, dtype=jnp.int32)
        start_Rx1 = jnp.tile(start, batch)[:, None]
        return Sight(*(of_rows(x) - start_Rx1 for x in sight))

    def joined(self, x_RxHxSxE: jax.Array, length: int) -> jax.Array:
        """The inverse of `queries`, for rows of `length` tokens."""
        _, heads, size, width = x_RxHxSxE.shape
        whole = jnp.moveaxis(x_RxHxSxE.reshape(-1, self.count, heads, size, width), 1, 2)
        return whole.reshape(-1, heads, self.count * size, width)[:, :, :length]

    def _rows(self, x_BxHxLxK: jax.Array) -> jax.Array:
        batch, heads, _, width = x_BxHxLxK.shape
        split = x_BxHxLxK.reshape(batch, heads, self.count, self.size, width)
        return jnp.moveaxis(split, 2, 1).reshape(batch * self.count, heads, self.size, width)


def stretches_of(queries: int, keys: int, window: int) -> Stretches | None:
    """How to cut a row whose last key is its last query's own; None: it is too short for two stretches.

    Args:
        queries: number of queries.
        keys: number of keys, at least as many.
        window: queries see only keys fewer than this many places away.
    """
    block = blocked_attention.SMALLEST
    reach = -(-(window - 1) // block) * block
    wanted = _TIMES * max(reach, block)
    count = -(-queries // wanted)
    if count == 1:
        return None
    size = -(-queries // (count * block)) * block
    return Stretches(count, size, reach, keys - queries)


def _padded(x_BxHxLxK: jax.Array, before: int, total: int) -> jax.Array:
    """With `before` zeros in front, or without so many of the first if negative, and zeros behind up to `total`."""
    kept = jax.lax.slice_in_dim(x_BxHxLxK, max(-before, 0), x_BxHxLxK.shape[2], axis=2)
    before = max(before, 0)
    return jnp.pad(kept, ((0, 0), (0, 0), (before, total - before - kept.shape[2]), (0, 0)))
