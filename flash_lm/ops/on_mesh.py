"""Work of the devices of a mesh: kernels, each on its sequences and heads, and a table that all need."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

_ROWS, _TENSOR = ("data", "fsdp"), "tensor"


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
    rows = _ROWS if batch % _devices(mesh) == 0 else None
    by_heads = all(x.shape[1] == 1 or x.shape[1] % tensor == 0 for x in leaves)

    def of_array(x: jax.Array) -> PartitionSpec:
        return PartitionSpec(rows, _TENSOR if by_heads and x.shape[1] > 1 else None)

    of_about = jax.tree.map(lambda x: PartitionSpec(rows if x.shape[0] == batch else None), about)
    out = PartitionSpec(rows, _TENSOR if by_heads and heads > 1 else None)
    # Pallas does not say over which axes its results vary.
    in_specs = (jax.tree.map(of_array, arrays), of_about)
    return jax.shard_map(function, in_specs=in_specs, out_specs=out, check_vma=False, mesh=mesh)(arrays, about)


def gather_table(table_VxD: jax.Array) -> jax.Array:
    """The table, whole on each device of a mesh but for its words, which are sharded over `tensor` if it divides V."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return table_VxD
    words = _TENSOR if table_VxD.shape[0] % mesh.shape[_TENSOR] == 0 else None
    return jax.lax.with_sharding_constraint(table_VxD, PartitionSpec(words, None))


def rows_per_device(batch: int) -> int:
    """Sequences of a batch on each device."""
    mesh = jax.sharding.get_abstract_mesh()
    return batch if mesh.empty else -(-batch // _devices(mesh))


def _devices(mesh: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in _ROWS)
