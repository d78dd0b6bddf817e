"""Position biases w of AFT (factorised, or by distance), computed for one rectangle of keys and queries at a time."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flash_lm.ops.matmul import matmul
from flash_lm.ops.rectangles import Rectangles

LARGEST = 40.0  # bound of |w|: exp(-80) is 2e-35, and the smallest normal number 1e-38


@dataclasses.dataclass(frozen=True)
class PairBias:
    """The w of pairs of tokens, from −LARGEST to LARGEST; zero for pairs at a distance of `window` or more.

    In a rectangle of pairs, the largest key and the largest w are subtracted separately. If they belong to different
    keys, each remaining factor is at least exp(−2 LARGEST), which float32 can represent; so no sum is 0.

    Attributes:
        query_index_BxL: index of each query in its sequence, (B or 1)×L.
        key_index_BxM: index of each key.
        window: static; None: all pairs have a w.
    """

    query_index_BxL: jax.Array
    key_index_BxM: jax.Array
    window: int | None = dataclasses.field(metadata={"static": True})

    def tile(self, where: Rectangles) -> jax.Array:
        """(B or 1)×(H or 1)×G×C×C float32, from queries to keys."""
        query_index, key_index = where.queries(self.query_index_BxL, 1), where.keys(self.key_index_BxM, 1)
        distance = query_index[..., :, None] - key_index[..., None, :]
        w = self.weights(distance, where).clip(-LARGEST, LARGEST)
        return w if self.window is None else jnp.where(jnp.abs(distance)[:, None] < self.window, w, 0)

    def weights(self, distance: jax.Array, where: Rectangles) -> jax.Array:
        """`tile` without the window; `distance`: (B or 1)×G×C×C."""
        raise TypeError(f"{type(self).__name__} must define weights")

    def bound(self) -> jax.Array:
        """An upper bound of |w|, a float32 scalar."""
        raise TypeError(f"{type(self).__name__} must define bound")

    def diagonal(self) -> jax.Array:
        """The w of each token with itself, (B or 1)×(H or 1)×L×1."""
        alone = lambda x, axis: jnp.expand_dims(x, axis + 1)
        return self.tile(Rectangles(keys=alone, queries=alone))[..., 0]

    def over_tokens(self, change: Callable[[jax.Array], jax.Array]) -> "PairBias":
        """The bias with `change` applied to each array whose axis 1 is the tokens."""
        raise TypeError(f"{type(self).__name__} must define over_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionBias(PairBias):
    """Factorised position bias w = u_t · v_t′ (AFT, section 3.1).

    Attributes:
        query_BxLxR: u of each query's position, (B or 1)×L×R float32.
        key_BxMxR: v of each key's position.
    """

    query_BxLxR: jax.Array
    key_BxMxR: jax.Array

    def bound(self) -> jax.Array:
        """The product of the largest norms of u and v."""
        longest = lambda x: jnp.sqrt(jnp.square(x).sum(axis=-1).max())
        return longest(self.query_BxLxR) * longest(self.key_BxMxR)

    def weights(self, distance: jax.Array, where: Rectangles) -> jax.Array:
        """A matrix product, shared by all channels."""
        query, key = where.queries(self.query_BxLxR, 1), where.keys(self.key_BxMxR, 1)
        return matmul(query, key, transpose_b=True)[:, None]

    def over_tokens(self, change: Callable[[jax.Array], jax.Array]) -> "PositionBias":
        """Changes all four arrays."""
        names = ("query_index_BxL", "key_index_BxM", "query_BxLxR", "key_BxMxR")
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in names})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TapBias(PairBias):
    """w by distance, one filter per head (AFT-conv, section 3.2).

    Attributes:
        taps_HxT: w by the distance query − key, starting at T − window, float32.
    """

    taps_HxT: jax.Array

    def bound(self) -> jax.Array:
        """The largest absolute tap."""
        return jnp.abs(self.taps_HxT).max()

    def weights(self, distance: jax.Array, where: Rectangles) -> jax.Array:
        """Looked up by distance."""
        count = self.taps_HxT.shape[1]
        assert self.window is not None
        tap = (distance + count - self.window).clip(0, count - 1)
        return jnp.moveaxis(self.taps_HxT[:, tap], 0, 1)

    def over_tokens(self, change: Callable[[jax.Array], jax.Array]) -> "TapBias":
        """Changes the indices; a reversed sequence keeps the sign of its distances."""
        names = ("query_index_BxL", "key_index_BxM")
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in names})
