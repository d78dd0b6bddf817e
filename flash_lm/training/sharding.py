"""The sharding policy: one mesh, and for each parameter the first rule that matches its path and divides it.

A matrix without a rule is sharded over fsdp along its largest divisible dimension; a vector is replicated.
"""

import bisect
import collections
import dataclasses
import itertools
import logging
import math
import re
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flash_lm.config.mesh import MESH_AXES, MeshConfig, axes_of
from flash_lm.config.model import ModelConfig
from flash_lm.data.share import Share
from flash_lm.errors import InputError
from flash_lm.families.family import unused_keys
from flash_lm.families.flash import GAUOptions
from flash_lm.layers.parameter import is_stacked, parameter_name
from flash_lm.models.decode_state import DecodeState
from flash_lm.ops.on_mesh import row_shards
from flash_lm.runs.hosts import gather_from_hosts
from flash_lm.training.train_state import Params, TrainState

_log = logging.getLogger(__name__)
BATCH = PartitionSpec(("data", "fsdp"))
_MOST_TENSOR = 4  # devices for which the cost of shared heads goes without saying
_AUTO = (AxisType.Auto,) * len(MESH_AXES)


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh of config.shape over `devices` (None: all).

    Raises:
        InputError: the shape does not match the number of devices, or parts of the cluster have different numbers.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config.shape, len(devices))
    # What JAX calls slices are machines with GPUs, or TPU slices, with a slower network between them.
    slices = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(slices) == 1:
        return jax.make_mesh(shape, MESH_AXES, axis_types=_AUTO, devices=devices)
    if len(set(slices.values())) > 1:
        raise InputError(
            f"the machines or slices have {', '.join(map(str, slices.values()))} devices: give each the same number"
        )
    # They divide the first axes, over which devices exchange least.
    between, left = [], len(slices)
    for size in shape:
        between.append(math.gcd(size, left))
        left //= between[-1]
    within = [size // parts for size, parts in zip(shape, between, strict=True)]
    grid = mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=_AUTO)


def make_abstract_mesh(config: MeshConfig, count: int) -> AbstractMesh:
    """The mesh of config.shape over devices that nothing is compiled for; raises as `make_mesh` does."""
    return AbstractMesh(mesh_shape(config.shape, count), MESH_AXES, axis_types=_AUTO)


def mesh_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The sizes of a mesh of so many devices, of which one may be -1: the rest.

    Raises:
        InputError: the sizes do not make this number.
    """
    known = math.prod(n for n in shape if n > 0)
    sizes = tuple(count // known if n == -1 else n for n in shape)
    if math.prod(sizes) != count:
        raise InputError(
            f"mesh.shape={shape} must make {count}, the number of devices: change a size, or set one to -1"
        )
    return sizes


def check_batch(mesh: Mesh, batch_size: int, accumulate: int | None, length: int | None = None) -> None:
    """Checks that each microbatch divides evenly over the devices.

    Args:
        mesh: the devices.
        batch_size: sequences of a batch.
        accumulate: number of microbatches; None: it is open.
        length: tokens of a sequence, so that the message can name the next larger batch; None: it does not.

    Raises:
        InputError: it does not.
    """
    shards, count = row_shards(mesh), accumulate or 1
    if batch_size % (shards * count):
        fewer = ", or leave train.accumulate open" if batch_size % shards == 0 else ""
        enough = f" to {-(-batch_size // (shards * count)) * shards * count * length}" if length else ""
        raise InputError(
            f"a batch of {batch_size} sequences (data.tokens_per_batch / data.length) must be a multiple of data x "
            f"fsdp x train.accumulate = {shards * count}: raise --config.data.tokens_per_batch{enough}, "
            f"change --config.mesh.shape{fewer}"
        )


def report_shared_heads(model: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Logs what a large tensor axis costs gated attention units, whose heads share their queries and keys."""
    tensor, heads = mesh.shape["tensor"], model[GAUOptions].heads
    if "model.gau.heads" not in unused_keys(model.families) and heads < tensor > _MOST_TENSOR:
        _log.warning(
            "mesh.shape has tensor=%d, and the queries and keys of a gated attention unit %d head%s: each device "
            "computes their scores, and devices add up their gradients; fsdp and data cost less (docs/scaling.md)",
            tensor,
            heads,
            "s" if heads > 1 else "",
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its sequences over the axes data and fsdp."""
    return NamedSharding(mesh, BATCH)


def param_shardings(abstract: Params, matrix: Any, config: MeshConfig, mesh: Mesh) -> Params:
    """The sharding of each parameter: from the first rule that matches its path, or else from its kind.

    Args:
        abstract: shapes.
        matrix: for each parameter, whether it is a matrix (see `layers.parameter`).
        config: the rules.
        mesh: from `make_mesh`.

    Raises:
        InputError: lists every parameter that a rule does not fit, one per line.
    """
    problems: list[str] = []
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, x, is_matrix: NamedSharding(mesh, _spec(path, x.shape, is_matrix, config, mesh, problems)),
        abstract,
        matrix,
    )
    if problems:
        raise InputError.of(problems)
    return shardings


def round_up_rows(rows: int, mesh: Mesh) -> int:
    """Rounds a batch size up to a multiple of data x fsdp."""
    parts = row_shards(mesh)
    return -(-rows // parts) * parts


def state_shardings(
    abstract: TrainState, matrix: Any, optimizer: optax.GradientTransformation, config: MeshConfig, mesh: Mesh
) -> TrainState:
    """The sharding of each array of the state; an optimizer's moments have their parameters' shardings.

    Args:
        abstract: shapes of the state.
        matrix: for each parameter, whether it is a matrix.
        optimizer: the optimizer of the state.
        config: the rules.
        mesh: from `make_mesh`.

    Raises:
        InputError: lists every parameter that a rule does not fit, one per line.
    """
    # Moments have the shardings of their parameters; all else of the optimizer's state is small, and replicated.
    params = param_shardings(abstract.params, matrix, config, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    # A factored moment has one dimension less than its parameter, and is small.
    moment_sharding = lambda moment, param, sharding: sharding if moment.shape == param.shape else replicated
    is_none = lambda moment: isinstance(moment, optax.MaskedNode)  # another rule's parameter
    opt_state = optax.tree_map_params(
        optimizer,
        lambda moment, *of_param: moment if is_none(moment) else moment_sharding(moment, *of_param),
        abstract.opt_state,
        abstract.params,
        params,
        transform_non_params=lambda _: replicated,
        is_leaf=is_none,
    )

    # The rest of the state.
    constants = jax.tree.map(lambda _: replicated, abstract.constants)
    carried = abstract.carried and carried_shardings(abstract.carried, mesh)
    ema = None if abstract.ema is None else params
    return TrainState(replicated, params, opt_state, constants, carried, ema)  # type: ignore[arg-type]


def carried_shardings(abstract: DecodeState, mesh: Mesh) -> DecodeState:
    """The shardings of a carried state: over the batch, which is the second dimension of stacked layers."""
    layers = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(None, *BATCH)), abstract.layers)
    return dataclasses.replace(abstract, positions_B=batch_sharding(mesh), layers=layers)  # type: ignore[arg-type]


def _spec(
    path: Any, shape: tuple[int, ...], is_matrix: bool, config: MeshConfig, mesh: Mesh, problems: list[str]
) -> PartitionSpec:
    """The partition spec of a parameter; adds to `problems` if it has rules and none fits."""
    name = parameter_name(path)
    # The first dimension of stacked layers is the layer, which lax.scan slices.
    stacked = (None,) if is_stacked(path) else ()
    default = _fsdp_spec(shape[len(stacked) :], mesh.shape["fsdp"]) if is_matrix else ()
    specs = [stacked + tuple(spec) for regex, spec in config.rules if re.search(regex, name)] or [stacked + default]
    misfits = [_misfits(spec, shape, name, mesh) for spec in specs]
    fitting = next((spec for spec, found in zip(specs, misfits, strict=True) if not found), None)
    if fitting is None:
        problems += misfits[0]
    return PartitionSpec(*(fitting or ()))


def _misfits(spec: tuple, shape: tuple[int, ...], name: str, mesh: Mesh) -> list[str]:
    """Why a spec does not fit a parameter; empty: it does."""
    if len(spec) > len(shape):
        return [f"mesh.rules: {spec} has more dimensions than the parameter {name} of shape {shape}"]
    parts = [(axes_of(entry), math.prod(mesh.shape[axis] for axis in axes_of(entry))) for entry in spec]
    return [
        f"mesh axis {' x '.join(axes)}={count} does not divide a dimension of {size} of {name}: choose another mesh "
        f"shape, or other mesh.rules"
        for size, (axes, count) in zip(shape, parts, strict=False)
        if size % count
    ]


def _fsdp_spec(shape: tuple[int, ...], parts: int) -> tuple[str | None, ...]:
    """The default of a matrix: fsdp along the largest dimension that it divides; replicated if it divides none."""
    divisible = [i for i, size in enumerate(shape) if size % parts == 0]
    if not divisible:
        return ()
    largest = max(divisible, key=lambda i: shape[i])
    return (None,) * largest + ("fsdp",)


def host_share(sharding: NamedSharding, batch_size: int) -> Share:
    """This host's share of a batch: the sequences of its devices, wherever they are in the mesh.

    Hosts that share a tensor axis read the same sequences.
    """
    # The indices of the sequences on this host's devices, and those of every other host.
    slices: Any = sharding.addressable_devices_indices_map((batch_size,)).values()
    host_rows = sorted({row for (rows,) in slices for row in range(batch_size)[rows]})
    groups = sorted({tuple(rows) for rows in gather_from_hosts(host_rows)})
    order = tuple(dict.fromkeys(itertools.chain.from_iterable(groups)))  # groups may have rows in common
    return Share(batch_size, host_rows, min(len(groups), batch_size), order)


def shard_batch(batch: dict[str, np.ndarray], sharding: NamedSharding, share: Share) -> dict[str, jax.Array]:
    """Puts this host's sequences of a batch on the devices, as global arrays."""

    def to_global(x: np.ndarray) -> jax.Array:
        def read_part(index: Any) -> np.ndarray:
            first, end, _ = index[0].indices(share.batch_size)
            start = bisect.bisect_left(share.rows, first)
            return x[start : start + end - first]

        return jax.make_array_from_callback((share.batch_size, *x.shape[1:]), sharding, read_part)

    return {name: to_global(x) for name, x in batch.items()}
