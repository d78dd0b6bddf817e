"""Free memory of the first device."""

import pathlib
import re

import jax


def free_memory() -> int | None:
    """Free bytes on the first device, or of the machine if that is the CPU; None: unknown."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
