"""Checks of the devices: free memory, and an accelerator that JAX does not use."""

import glob
import logging
import os
import pathlib
import re
import sys
from collections.abc import Mapping

import jax

_log = logging.getLogger(__name__)
# Files of a driver -> what JAX is to be installed for.
_DRIVERS = {"/dev/nvidia[0-9]*": "cuda", "/dev/accel*": "tpu"}


def report_unused_accelerator(drivers: Mapping[str, str] = _DRIVERS) -> None:
    """Logs a warning if JAX runs on the CPU of a machine with a GPU or TPU, unless JAX_PLATFORMS is set."""
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return
    # A driver's device files show an accelerator even if JAX was installed without support for it.
    for files, name in drivers.items():
        if device_files := glob.glob(files):
            _log.warning(
                "this machine has %s, but JAX runs on its CPU: run make setup DEVICE=%s, or set JAX_PLATFORMS=cpu",
                device_files[0],
                name,
            )


def peak_memory() -> int | None:
    """The most bytes in use so far on the first device of this host, or of the process on a CPU; None: unknown."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("peak_bytes_in_use")
    try:
        import resource  # noqa: PLC0415 (not on every system)
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory() -> int | None:
    """Free bytes on the first device of this host, or of the machine if that is the CPU; None: unknown."""
    device = jax.local_devices()[0]  # another host's does not say
    if device.platform != "cpu":
        stats = device.memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
