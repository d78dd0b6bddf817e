"""Work of the devices of a mesh: kernels, each on its sequences and heads, and a table that all need."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

_ROWS, _TENSOR = ("data", "fsdp"), "tensor"
_TABLE = _TENSOR, "fsdp"  # of V×D


def on_mesh(function: Callable[[Any, Any], jax.Array], arrays: Any, about: Any) -> jax.Array:
    """Calls function(arrays, about) on each device of the mesh, if there is one, for its part of the arrays.

    Args:
        function: independent for sequences and heads; returns B×H×….
        arrays: a tree of B×H×…; one with a single head belongs to all heads.
        about: a tree of (B or 1)×…, the same for all heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(arrays, about)
    leaves = jax.tree.leaves(arrays)
    batch, heads, tensor = leaves[0].shape[0], max(x.shape[1] for x in leaves), mesh.shape[_TENSOR]
    rows = _ROWS if batch % row_shards(mesh) == 0 else None
    by_heads = all(x.shape[1] == 1 or x.shape[1] % tensor == 0 for x in leaves)

    def of_array(x: jax.Array) -> PartitionSpec:
        return PartitionSpec(rows, _TENSOR if by_heads and x.shape[1] > 1 else None)

    of_about = jax.tree.map(lambda x: PartitionSpec(rows if x.shape[0] == batch else None), about)
    out = PartitionSpec(rows, _TENSOR if by_heads and heads > 1 else None)
    # Pallas does not say over which axes its results vary.
    in_specs = (jax.tree.map(of_array, arrays), of_about)
    return jax.shard_map(function, in_specs=in_specs, out_specs=out, check_vma=False, mesh=mesh)(arrays, about)


def gather_table(table_VxD: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The table in a dtype, whole on each device of a mesh but for its words: over `tensor`, if that divides V."""
    table_VxD = table_VxD.astype(dtype)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return table_VxD
    # Two constraints, so that it is rounded before it is gathered.
    words, columns = _table_axes(table_VxD.shape, mesh)
    table_VxD = jax.lax.with_sharding_constraint(table_VxD, PartitionSpec(words, columns))
    return jax.lax.with_sharding_constraint(table_VxD, PartitionSpec(words, None))


def sum_parts(x_PxVxD: jax.Array) -> jax.Array:
    """Sums the gradients of a table over the parts of a batch, V×D.

    If each device has one part, they exchange sums once: those over fsdp are scattered along D, so that a device keeps
    only its columns of them, and those over data are of these columns. XLA may all-reduce the whole table otherwise.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or len(x_PxVxD) == 1 or len(x_PxVxD) != row_shards(mesh):
        return x_PxVxD.sum(axis=0)
    words, columns = _table_axes(x_PxVxD.shape[1:], mesh)

    def exchange(x_1xVxD: jax.Array) -> jax.Array:
        if columns is None or mesh.shape[columns] == 1:
            return jax.lax.psum(x_1xVxD[0], _ROWS)
        x_VxD = jax.lax.psum_scatter(x_1xVxD[0], columns, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x_VxD, "data")

    specs = PartitionSpec(_ROWS, words, None), PartitionSpec(words, columns)
    return jax.shard_map(exchange, in_specs=specs[:1], out_specs=specs[1], mesh=mesh)(x_PxVxD)


def row_shards(mesh: Any) -> int:
    """The number of shards of a batch, data x fsdp; each sequence is on all devices of the tensor axis."""
    return math.prod(mesh.shape[axis] for axis in _ROWS)


def batch_parts(batch: int) -> int:
    """Number of equal parts into which the devices of the mesh divide so many sequences; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.gcd(batch, row_shards(mesh))


def rows_per_device(batch: int) -> int:
    """Sequences of a batch on each device."""
    mesh = jax.sharding.get_abstract_mesh()
    return batch if mesh.empty else -(-batch // row_shards(mesh))


def _table_axes(shape: tuple[int, ...], mesh: Any) -> tuple[str | None, str | None]:
    """The axes of a table's words and columns; None: the axis does not divide them."""
    words, columns = (axis if n % mesh.shape[axis] == 0 else None for n, axis in zip(shape, _TABLE, strict=True))
    return words, columns
