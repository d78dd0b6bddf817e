"""What differs between the machines that the programs run on: tiles, where scalars lie, how a Toeplitz tile is made."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of what a program holds at a time; see docs/performance.md for why.

    Attributes:
        rows: of scores and of the result.
        columns: of scores.
        value_bytes: of a row of values.
        depth: of the values, as the sum that `score_derivatives` runs over.
        sums: values that `entering_sums` sums up.
    """

    rows: int
    columns: int
    value_bytes: int
    depth: int
    sums: int

    def values(self, dtype: Any) -> int:
        """Values of a row."""
        return self.value_bytes // jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Backend:
    """One of the machines.

    Attributes:
        tile: sizes.
        width: -> the width of queries and keys that the programs need for theirs.
        scalars: -> spec of a small array that is read number by number.
        diagonals: (ref of 1×W values, place of the top right … bottom left diagonal's first, shape of the tile) -> a
            tile whose element (i, j) is the value at start + j − i + rows − 1.
        options: number of grid dimensions -> arguments of `pallas_call`.
    """

    tile: Tile
    width: Callable[[int], int]
    scalars: Callable[[], pl.BlockSpec]
    diagonals: Callable[[Any, jax.Array, tuple[int, ...]], jax.Array]
    options: Callable[[int], dict[str, Any]]


def _gathered(ref: Any, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return ref[0, start + column - row + shape[0] - 1]


def _rolled(ref: Any, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """By rotating each row one place further: a TPU has no lookup."""
    rows, columns = shape
    width = rows + columns
    values = jnp.broadcast_to(ref[:, pl.ds(pl.multiple_of(start, 128), width)], (rows, width))
    return tpu.roll(values, columns + 1, 1, stride=1, stride_axis=0)[:, :columns]


def _on_triton(dimensions: int) -> dict[str, Any]:
    del dimensions
    return {"compiler_params": triton.CompilerParams(num_warps=8, num_stages=2)}


def _on_mosaic(dimensions: int) -> dict[str, Any]:
    return {
        "compiler_params": tpu.CompilerParams(
            dimension_semantics=("parallel",) * dimensions, vmem_limit_bytes=100 * 2**20
        )
    }


def _in_scalar_memory() -> pl.BlockSpec:
    return pl.BlockSpec(memory_space=tpu.SMEM)


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _lanes(width: int) -> int:
    return -(-width // 128) * 128


BACKENDS = {
    "triton": Backend(Tile(128, 64, 512, 64, 128), _power_of_two, pl.BlockSpec, _gathered, _on_triton),
    "mosaic": Backend(Tile(128, 128, 1024, 256, 256), _lanes, _in_scalar_memory, _rolled, _on_mosaic),
    # Small tiles, so that small arrays have several.
    "interpreted": Backend(
        Tile(16, 8, 64, 8, 16), lambda width: width, pl.BlockSpec, _gathered, lambda _: {"interpret": True}
    ),
}
