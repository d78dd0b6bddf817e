"""Sparse softmax attention to keys at fixed offsets from the query (LogSparse).

Without gathering keys, and without an L×L array: time and memory grow with the tokens times the offsets.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flash_lm.ops.attention_functions import masked_softmax
from flash_lm.ops.banded_softmax import softmax_of_scores
from flash_lm.ops.matmul import matmul
from flash_lm.ops.visibility import KeySpan, is_between

_UNROLLED = 4  # offsets that a pass over the tokens takes together
_BLOCK = 128  # queries whose keys are gathered together


def log_sparse_offsets(length: int, local: int, restart: int, causal: bool) -> tuple[int, ...]:
    """Offsets of the keys of LogSparse attention, in sequences of `length` tokens ("LogSparse", definitions 3 and 4).

    Args:
        length: offsets are less than this.
        local: number of tokens, the query included, that are all seen; before them at distances 1, 2, 4, ….
        restart: the pattern of this many tokens is repeated before them; 0: it is not.
        causal: no keys after the query; otherwise the pattern on both sides.
    """
    period = restart or length
    once = [*range(local)] + [local - 1 + (1 << p) for p in range(max(period, 1).bit_length())]
    back = {o + start for start in range(0, length, period) for o in once if o < period and o + start < length}
    return tuple(sorted(back if causal else back | {-o for o in back}))


def attend_at_offsets(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    key_span: KeySpan,
    offsets: Sequence[int],
    *,
    scale: float,
) -> jax.Array:
    """Sparse attention softmax(scale · q kᵀ) v over the visible keys at these offsets before the query: B×H×L×E.

    Args:
        q_BxHxLxK: queries, at indices 0 … L − 1.
        k_BxHxLxK: keys, at the same indices.
        v_BxHxLxE: values.
        key_span: keys that each query sees.
        offsets: index of the query minus index of the key.
        scale: factor of q kᵀ.
    """
    offset_O = jnp.asarray(offsets, jnp.int32)
    # A mask and a score per offset, in place of an L×L matrix.
    key_OxBxL = key_span.index_BxL[None] - offset_O[:, None, None]
    visible_OxBxL = is_between(key_span.first_BxL[None], key_OxBxL, key_span.stop_BxL[None])
    scores_OxBxHxL = _products(q_BxHxLxK, k_BxHxLxK, offset_O) * scale
    # Over the last dimension, and back.
    scores_BxHxLxO, visible_BxLxO = jnp.moveaxis(scores_OxBxHxL, 0, -1), jnp.moveaxis(visible_OxBxL, 0, -1)
    weights_BxHxLxO = masked_softmax(scores_BxHxLxO, visible_BxLxO[:, None], jnp.ones(()))
    return _sums(jnp.moveaxis(weights_BxHxLxO, -1, 0), v_BxHxLxE, offset_O).astype(v_BxHxLxE.dtype)


def attend_in_cache(
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    key_span: KeySpan,
    offsets: Sequence[int],
    *,
    scale: float,
) -> jax.Array:
    """`attend_at_offsets` over a KV cache, for queries from any position per sequence, B×H×L×E."""
    offset_O = jnp.asarray(offsets, jnp.int32)

    def attend_query(one: tuple[jax.Array, KeySpan]) -> jax.Array:
        q_BxHx1xK, seen = one
        place_BxO = seen.index_BxL - offset_O[None]
        visible_BxO = is_between(seen.first_BxL, place_BxO, seen.stop_BxL)
        slot_Bx1xOx1 = jnp.clip(place_BxO, 0, k_BxHxMxK.shape[2] - 1)[:, None, :, None]
        key_BxHxOxK, value_BxHxOxE = (jnp.take_along_axis(x, slot_Bx1xOx1, axis=2) for x in (k_BxHxMxK, v_BxHxMxE))
        scores_BxHx1xO = matmul(q_BxHx1xK.astype(key_BxHxOxK.dtype), key_BxHxOxK, transpose_b=True) * scale
        return softmax_of_scores(scores_BxHx1xO, visible_BxO[:, None, None], value_BxHxOxE).out_BxHxLxE

    if q_BxHxLxK.shape[2] == 1:
        return attend_query((q_BxHxLxK, key_span))
    # Queries in blocks, since each query gathers its keys.
    queries = jnp.moveaxis(q_BxHxLxK, 2, 0)[..., None, :], KeySpan(*(x.T[..., None] for x in key_span))
    out_LxBxHx1xE = jax.lax.map(attend_query, queries, batch_size=_BLOCK)
    return jnp.moveaxis(out_LxBxHx1xE[..., 0, :], 0, 2)


@jax.custom_vjp
def _products(x_BxHxLxK: jax.Array, y_BxHxLxK: jax.Array, offset_O: jax.Array) -> jax.Array:
    """x_t · y_(t − o) of each offset o, O×B×H×L float32; zero outside the sequence."""
    read = _reader(y_BxHxLxK)
    of_offset = lambda _, o: (None, (x_BxHxLxK.astype(jnp.float32) * read(-o)).sum(axis=-1))
    return jax.lax.scan(of_offset, None, offset_O, unroll=_UNROLLED)[1]


@jax.custom_vjp
def _sums(w_OxBxHxL: jax.Array, y_BxHxLxE: jax.Array, offset_O: jax.Array) -> jax.Array:
    """Σ_o w_(o, t) y_(t − o), B×H×L×E float32."""
    read = _reader(y_BxHxLxE)

    def add(sum_BxHxLxE: jax.Array, at: tuple[jax.Array, jax.Array]):
        w_BxHxL, o = at
        return sum_BxHxLxE + w_BxHxL[..., None] * read(-o), None

    start = jnp.zeros(y_BxHxLxE.shape, jnp.float32)
    return jax.lax.scan(add, start, (w_OxBxHxL, offset_O), unroll=_UNROLLED)[0]


def _spread(w_OxBxHxL: jax.Array, x_BxHxLxE: jax.Array, offset_O: jax.Array) -> jax.Array:
    """The transpose of `_sums` by y: Σ_o w_(o, u + o) x_(u + o), B×H×L×E float32."""
    read = _reader(x_BxHxLxE)

    def add(sum_BxHxLxE: jax.Array, at: tuple[jax.Array, jax.Array]):
        w_BxHxL, o = at
        return sum_BxHxLxE + _reader(w_BxHxL[..., None])(o) * read(o), None

    start = jnp.zeros(x_BxHxLxE.shape, jnp.float32)
    return jax.lax.scan(add, start, (w_OxBxHxL, offset_O), unroll=_UNROLLED)[0]


def _reader(x_BxHxLxK: jax.Array):
    """A function from a traced o to x_(t + o), float32, zero outside the sequence."""
    length = x_BxHxLxK.shape[2]
    around = jnp.pad(x_BxHxLxK, ((0, 0), (0, 0), (length, length), (0, 0)))
    return lambda o: jax.lax.dynamic_slice_in_dim(around, length + o, length, axis=2).astype(jnp.float32)


def _products_forward(x, y, offset_O):
    return _products(x, y, offset_O), (x, y, offset_O)


def _products_backward(kept, d_OxBxHxL):
    x, y, offset_O = kept
    d_x, d_y = _sums(d_OxBxHxL, y, offset_O), _spread(d_OxBxHxL, x, offset_O)
    return d_x.astype(x.dtype), d_y.astype(y.dtype), None


def _sums_forward(w, y, offset_O):
    return _sums(w, y, offset_O), (w, y, offset_O)


def _sums_backward(kept, d_BxHxLxE):
    w, y, offset_O = kept
    return _products(d_BxHxLxE, y, offset_O), _spread(w, d_BxHxLxE, offset_O).astype(y.dtype), None


_products.defvjp(_products_forward, _products_backward)
_sums.defvjp(_sums_forward, _sums_backward)
