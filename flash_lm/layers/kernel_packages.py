"""Kernels of other packages for attention cores, found by an entry point and chosen by `model.kernels`.

A package that serves cores has, in its pyproject.toml,

    [project.entry-points."flash_lm.kernels"]
    mine = "my_package:KERNELS"

with KERNELS = {"delta_rule": CoreKernel(compute, problem), …}; then --config.model.kernels=mine uses it. `auto` never
does.
"""

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.config.model import KERNEL_GROUP, KERNELS
from flash_lm.errors import InputError, first_line
from flash_lm.ops.implementations import report
from flash_lm.ops.on_mesh import on_mesh

# What a package may serve: causal sums per document, S_0 = 0 and o_t = q_t S_t. Queries and keys are B×H×L×K, in H
# heads or one that all share, and values B×H×L×E.
CORES: Mapping[str, str] = {
    "linear_sums": "S_t = S_{t−1} + k_tᵀ v_t; by = (q, k), features in float32, and v with a column of ones",
    "decayed_sums": "S_t = e^{g_t} S_{t−1} + k_tᵀ v_t; by = (q, k, g), g B×H×L float32",
    "gated_sums": "S_t = diag(e^{g_t}) S_{t−1} + k_tᵀ v_t; by = (q, k, g), g B×H×L×K float32",
    "delta_rule": "S̃ = e^{g_t} S_{t−1}, S_t = S̃ + k_tᵀ β_t (v_t − k_t S̃); by = (q, k, g, β), g and β B×H×L float32",
}


class CoreKernel(NamedTuple):
    """A kernel for a core.

    Attributes:
        compute: (by, v, runs) -> B×H×L×E, differentiable in `by` and v. `runs`, B×L int32, numbers the document of
            each token, 0 for padding; a document sees nothing of others.
        problem: (by, v) -> why it cannot compute arrays of these shapes and dtypes here, or None.
    """

    compute: Callable[[tuple, jax.Array, jax.Array], jax.Array]
    problem: Callable[[tuple, Any], str | None] = lambda by, v: None


def compute_by_package(
    requested: str, core: str, by: tuple, v_BxHxLxE: jax.Array, runs_BxL: jax.Array, unless: str | None = None
) -> jax.Array | None:
    """What the requested package computes for a core; None: XLA must, for a reason that is reported.

    Args:
        requested: `model.kernels`.
        core: a name of `CORES`.
        by: what the core needs besides the values, as `CORES` says.
        v_BxHxLxE: values.
        runs_BxL: document of each token, (B or 1)×L, 0 for padding.
        unless: why a package cannot be used here; None: it can.

    Raises:
        InputError: the package cannot be imported, or does not declare kernels as it should.
    """
    if requested in KERNELS:
        return None
    part, kernel = core.replace("_", " "), load_kernels(requested).get(core)
    reason = unless or (f"{requested} has no {core}" if kernel is None else _problem(kernel, by, v_BxHxLxE))
    if reason or kernel is None:
        report(part, f"compiled by XLA, {reason}")
        return None
    report(part, requested)
    return _compute(kernel, by, v_BxHxLxE, jnp.broadcast_to(runs_BxL, (v_BxHxLxE.shape[0], runs_BxL.shape[1])))


def _compute(kernel: CoreKernel, by: tuple, v: jax.Array, runs_BxL: jax.Array) -> jax.Array:
    return on_mesh(lambda arrays, runs: kernel.compute(arrays[0], arrays[1], runs), (by, v), runs_BxL)


@functools.cache
def load_kernels(name: str) -> Mapping[str, CoreKernel]:
    """Imports the kernels of an installed package, by the name of its entry point.

    Raises:
        InputError: it cannot be imported, or its entry point is no table of kernels.
    """
    (entry, *_) = importlib.metadata.entry_points(group=KERNEL_GROUP, name=name)
    try:
        kernels = entry.load()
    except Exception as error:  # a package may do anything
        raise InputError(f"model.kernels={name}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(kernels, Mapping) or not all(isinstance(kernel, CoreKernel) for kernel in kernels.values()):
        raise InputError(f"model.kernels={name}: {entry.value} must be a dict from names of cores to CoreKernel")
    if unknown := kernels.keys() - CORES.keys():
        raise InputError(f"model.kernels={name}: there is no core {min(unknown)}: one of {', '.join(CORES)}")
    return kernels


def _problem(kernel: CoreKernel, by: tuple, v: jax.Array) -> str | None:
    """Why a kernel cannot compute this core and its derivative, in words; None: it can."""
    if reason := kernel.problem(by, v):
        return reason
    # The package may also find out as it is traced.
    runs = jax.ShapeDtypeStruct((v.shape[0], v.shape[2]), jnp.int32)
    total = lambda by, v, runs: _compute(kernel, by, v, runs).astype(jnp.float32).sum()
    try:
        jax.eval_shape(jax.grad(total, argnums=(0, 1)), by, v, runs)
    except Exception as error:  # a package may raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    return None
