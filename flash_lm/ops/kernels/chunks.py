"""Chunkwise attention by kernels: chunks, spans of visible keys, and sharding over the devices of a mesh."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flash_lm.ops.chunks import from_chunks, to_chunks
from flash_lm.ops.kernels.attention import attend
from flash_lm.ops.kernels.programs import Form, Seen
from flash_lm.ops.log_decay import Running
from flash_lm.ops.visibility import KeySpan

_ROWS, _TENSOR = ("data", "fsdp"), "tensor"


class Across(NamedTuple):
    """Queries and keys of the sum over earlier chunks, B×H×L×K, and 1 / N of each query, (B or 1)×L float32."""

    q_BxHxLxK: jax.Array
    k_BxHxLxK: jax.Array
    weight_BxL: jax.Array


def attend_in_chunks(
    form: Form,
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    runs_BxL: jax.Array,
    key_span: KeySpan,
    *,
    chunk_size: int,
    divisor_BxL: jax.Array,
    bias_W: jax.Array | None = None,
    across: Across | None = None,
    decay: Running | None = None,
) -> jax.Array:
    """Chunkwise attention by a kernel: f(scale · q kᵀ + b) / N · v inside the chunk, plus q Σ kᵀv / N before it.

    Under a mesh sequences and heads are sharded over devices (with a single head, the values are).

    Args:
        form: form of the weights.
        q_BxHxLxK: queries.
        k_BxHxLxK: keys.
        v_BxHxLxE: values.
        runs_BxL: run of each token (see `Segments`), (B or 1)×L.
        key_span: keys that each query sees, in the full sequence.
        chunk_size: C; the row's length for attention over all pairs.
        divisor_BxL: N of each query inside its chunk, (B or 1)×L float32, not zero.
        bias_W: bias for the distances 1 − C … C − 1 from query to key, float32.
        across: the sum over earlier chunks; None: no sum.
        decay: running sums of logarithms of decays, B×H×L float32, as for `attend`; None: nothing decays.

    Returns:
        B×H×L×E, dtype of v.
    """
    size = min(chunk_size, v_BxHxLxE.shape[2])
    if bias_W is not None:
        bias_W = bias_W[chunk_size - size : chunk_size + size - 1]
    about = (_seen(key_span, size, divisor_BxL), _crossing(runs_BxL, size) if across else None)
    arrays = (q_BxHxLxK, k_BxHxLxK, v_BxHxLxE)
    if across is not None:
        # Without chunks before it a query has nothing to read: the sum belongs to another document.
        weight_BxL = jnp.where(key_span.before_chunk(size) > 0, across.weight_BxL, 0)
        arrays += (across.q_BxHxLxK * weight_BxL[:, None, :, None].astype(across.q_BxHxLxK.dtype), across.k_BxHxLxK)
    if decay is not None:
        arrays += tuple(decay)

    def on_device(arrays: tuple, about: tuple, bias_W: jax.Array | None) -> jax.Array:
        seen, crossing = about
        q, k, v, *others = (to_chunks(x.reshape(-1, *x.shape[2:]), size) for x in arrays)
        sums = None
        if crossing is not None:
            stays_BxGxC, goes_on_BxG = crossing
            x, y, *others = others
            stays_NxGxC = jnp.repeat(stays_BxGxC, x.shape[0] // stays_BxGxC.shape[0], axis=0)
            sums = (x, jnp.where(stays_NxGxC[..., None], y, 0), goes_on_BxG)
        out = attend(form, q, k, v, seen, bias_W, sums, Running(*others) if others else None)
        return from_chunks(out, arrays[2].shape[2]).reshape(arrays[2].shape)

    return _on_mesh(on_device, arrays, about, bias_W)


def _seen(key_span: KeySpan, size: int, divisor_BxL: jax.Array) -> Seen:
    _, first_BxL, stop_BxL = key_span.clip_to_chunks(size)
    inverse_BxL = jnp.broadcast_to(1 / divisor_BxL, first_BxL.shape)
    return Seen(*(to_chunks(x_BxL, size) for x_BxL in (first_BxL, stop_BxL, inverse_BxL)))


def _crossing(runs_BxL: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Which keys' document continues into the next chunk; and whether the sum that enters a chunk leaves it."""
    runs_BxGxC = to_chunks(runs_BxL, size)
    last_BxG = runs_BxGxC[:, :, -1]
    entering_BxG = jnp.pad(last_BxG[:, :-1], ((0, 0), (1, 0)))
    return (runs_BxGxC == last_BxG[..., None]) & (runs_BxGxC > 0), (entering_BxG == last_BxG).astype(jnp.int32)


def _on_mesh(function: Callable, arrays: tuple, about: tuple, bias_W: jax.Array | None) -> jax.Array:
    """Calls a kernel on each device for its part of the B×H×L×… arrays, since kernels are not partitioned by JAX."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(arrays, about, bias_W)
    batch, heads, _, expanded = arrays[2].shape
    of_rows, tensor = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape[_TENSOR]
    rows = _ROWS if batch % of_rows == 0 else None
    by_heads = heads % tensor == 0
    by_values = not by_heads and expanded % tensor == 0
    pairs = PartitionSpec(rows, _TENSOR if by_heads else None)
    values = PartitionSpec(rows, _TENSOR if by_heads else None, None, _TENSOR if by_values else None)
    specs = tuple(values if i == 2 else pairs for i in range(len(arrays)))
    of_about = jax.tree.map(lambda x: PartitionSpec(rows if x.shape[0] == batch else None), about)
    # Pallas does not say over which axes its results vary.
    shared = jax.shard_map(
        function, in_specs=(specs, of_about, PartitionSpec()), out_specs=values, check_vma=False, mesh=mesh
    )
    return shared(arrays, about, bias_W)
