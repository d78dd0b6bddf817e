"""Choice between a kernel and XLA for a part of a model: it depends on `model.kernels`, the machine and the shape."""

import jax

from flash_lm.ops.implementations import report
from flash_lm.ops.kernels.backends import BACKENDS, Work
from flash_lm.ops.target import target_platform

_BACKENDS = {"gpu": "triton", "tpu": "mosaic"}
_SMALLEST = 128  # queries in a chunk: with fewer, a tile is mostly padding
_NARROWEST = 64  # width of queries and values: likewise
# XLA's form of the Linear Transformer, values of 64, is faster on an H200: benchmarks/gpu/results/kernels/.
_NARROWEST_VALUES = {"gpu": 128, "tpu": 64}


def choose_backend(
    requested: str, part: str, function: str, size: int, q: jax.Array, v: jax.Array, unless: str | None = None
) -> str | None:
    """The backend of a part of a model; it is reported.

    Args:
        requested: `model.kernels`: "auto", "xla" or "pallas", which a CPU interprets; or another package's name.
        part: name of the part, for the log.
        function: function of the scores.
        size: queries in a chunk.
        q: queries, …×L×K.
        v: values, …×L×E.
        unless: why this part cannot use a kernel, whatever is requested; None: it can.

    Returns:
        A name of `BACKENDS`, or None for the form that XLA compiles.
    """
    platform = target_platform()
    backend = _BACKENDS.get(platform, "interpreted")
    if requested not in ("auto", "pallas"):
        unless = f"model.kernels={requested}"
    elif unless is None and (missing := BACKENDS[backend].missing()):
        unless = missing
    elif unless is None and function not in BACKENDS[backend].functions:
        unless = f"{function} has no kernel for {platform}"
    elif unless is None and requested == "auto":
        unless = _problem(platform, backend, size, q, v)
    report(part, f"compiled by XLA, {unless}" if unless else f"Pallas kernel ({backend})")
    return None if unless else backend


def _problem(platform: str, backend: str, size: int, q: jax.Array, v: jax.Array) -> str | None:
    """Why a kernel would not help, or None."""
    (length, width), expanded = q.shape[-2:], v.shape[-1]
    if platform not in _BACKENDS:
        return f"{platform} has no kernels"
    if size < _SMALLEST or width % _NARROWEST or expanded % _NARROWEST:
        return f"{size} queries of {width} and values of {expanded} would be mostly padding"
    if expanded < _NARROWEST_VALUES[platform]:
        return f"values of {expanded} are too narrow for a kernel to be faster"
    return BACKENDS[backend].problem(Work(length, width, q.dtype.itemsize))
