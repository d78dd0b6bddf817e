"""How the machines that run the programs differ: tiles, where scalars are, how a Toeplitz tile is made."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flash_lm.ops.attention_functions import ELEMENTWISE
from flash_lm.ops.target import target_platform


def _module(name: str) -> Any:
    """A part of Pallas, or None: JAX removes what it has deprecated, as Triton's since 0.11."""
    try:
        return importlib.import_module(f"jax.experimental.pallas.{name}")
    except ImportError:
        return None


tpu, triton = _module("tpu"), _module("triton")

# Shared memory of a GPU that `weighted_values` needs, with queries of up to this many bytes.
_SHARED_BYTES = 164_608
_SHARED_KEY_BYTES = 256
_VMEM_BYTES = 100 * 2**20  # of the 128 MiB of a TPU


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of what a program holds at a time; docs/performance.md says why.

    Attributes:
        rows: rows of scores and of the result.
        columns: columns of scores.
        value_bytes: bytes in a row of values.
        entering_bytes: likewise, where sums enter the chunk, which need further memory.
        depth: width of the slices of values that `score_derivatives` sums over.
        keys: dimensions of keys in a tile of `entering_sums`.
        sums: dimensions of values in a tile of `entering_sums`.
    """

    rows: int
    columns: int
    value_bytes: int
    entering_bytes: int
    depth: int
    keys: int
    sums: int

    def values(self, dtype: Any, *, entering: bool = False) -> int:
        """Number of values in a row; `entering`: whether sums enter the chunk."""
        return (self.entering_bytes if entering else self.value_bytes) // jnp.dtype(dtype).itemsize


class Work(NamedTuple):
    """The size of a kernel's work: tokens in a row, width of queries, bytes of a number."""

    length: int
    key_width: int
    itemsize: int


@dataclasses.dataclass(frozen=True)
class Backend:
    """One of the machines.

    Attributes:
        tile: tile sizes.
        functions: functions of the scores that it can compute.
        problem: given the work, why this machine cannot do it, or None.
        missing: why this version of JAX has no such kernels, or None.
        first_is_fastest: whether programs that are adjacent in the grid's first dimension run at the same time.
        width: given the width of queries and keys, the padded width that the programs need.
        scalars: makes the spec of a small array that is read number by number.
        diagonals: (ref of 1×W values, start, shape of the tile) -> a tile whose element (i, j) is
            the value at start + j − i + rows − 1.
        options: given the number of grid dimensions, arguments of `pallas_call`.
    """

    tile: Tile
    functions: frozenset[str]
    problem: Callable[[Work], str | None]
    missing: Callable[[], str | None]
    first_is_fastest: bool
    width: Callable[[int], int]
    scalars: Callable[[], pl.BlockSpec]
    diagonals: Callable[[Any, jax.Array, tuple[int, ...]], jax.Array]
    options: Callable[[int], dict[str, Any]]


def _gathered(ref: Any, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return ref[0, start + column - row + shape[0] - 1]


def _rolled(ref: Any, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Rotates each row by one column more than the row above: a TPU has no lookup."""
    rows, columns = shape
    width = rows + columns
    values = jnp.broadcast_to(ref[:, pl.ds(pl.multiple_of(start, 128), width)], (rows, width))
    return tpu.roll(values, columns + 1, 1, stride=1, stride_axis=0)[:, :columns]


def shared_memory() -> int:
    """Bytes of shared memory that a program on the GPU may use; 0 if the device does not say."""
    device = jax.devices()[0]
    # Compiled ahead of time for a GPU that is not here: a Hopper, see `training.ahead_of_time`.
    return getattr(device, "shared_memory_per_block_optin", 0) if device.platform == target_platform() else 232_448


def _problem_on_triton(work: Work) -> str | None:
    if shared_memory() < _SHARED_BYTES:
        return f"{shared_memory():,} bytes of shared memory, but the kernels need {_SHARED_BYTES:,}"
    if work.key_width * work.itemsize > _SHARED_KEY_BYTES:
        return f"queries of {work.key_width * work.itemsize} bytes, but there is room for only {_SHARED_KEY_BYTES}"
    return None


def _problem_on_mosaic(work: Work) -> str | None:
    tile = BACKENDS["mosaic"].tile
    # The keys and a tile of the values of a full sequence, twice, because the next ones are being loaded.
    needed = 2 * work.length * (work.key_width * work.itemsize + tile.value_bytes)
    return f"sequences of {work.length} tokens need {needed:,} bytes of VMEM" if needed > 0.9 * _VMEM_BYTES else None


def _triton_options(dimensions: int) -> dict[str, Any]:
    del dimensions
    return {"compiler_params": triton.CompilerParams(num_warps=8, num_stages=2)}


def _mosaic_options(dimensions: int) -> dict[str, Any]:
    parallel = ("parallel",) * dimensions
    return {"compiler_params": tpu.CompilerParams(dimension_semantics=parallel, vmem_limit_bytes=_VMEM_BYTES)}


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _lanes(width: int) -> int:
    return -(-width // 128) * 128


BACKENDS = {
    "triton": Backend(
        tile=Tile(rows=128, columns=64, value_bytes=512, entering_bytes=256, depth=64, keys=64, sums=128),
        functions=frozenset(ELEMENTWISE) - {"laplace"},  # Pallas cannot lower the error function to Triton
        problem=_problem_on_triton,
        missing=lambda: None if triton else "this version of jax has no Pallas for Triton",
        first_is_fastest=True,
        width=_power_of_two,
        scalars=pl.BlockSpec,
        diagonals=_gathered,
        options=_triton_options,
    ),
    "mosaic": Backend(
        tile=Tile(rows=128, columns=128, value_bytes=1024, entering_bytes=1024, depth=256, keys=128, sums=256),
        functions=frozenset(ELEMENTWISE),
        problem=_problem_on_mosaic,
        missing=lambda: None if tpu else "this version of jax has no Pallas for a TPU",
        first_is_fastest=False,
        width=_lanes,
        scalars=lambda: pl.BlockSpec(memory_space=tpu.SMEM),
        diagonals=_rolled,
        options=_mosaic_options,
    ),
    "interpreted": Backend(
        tile=Tile(
            rows=16, columns=8, value_bytes=64, entering_bytes=32, depth=8, keys=8, sums=16
        ),  # small arrays have several, too
        functions=frozenset(ELEMENTWISE),
        problem=lambda work: None,
        missing=lambda: None,
        first_is_fastest=False,
        width=lambda width: width,
        scalars=pl.BlockSpec,
        diagonals=_gathered,
        options=lambda dimensions: {"interpret": True},
    ),
}
