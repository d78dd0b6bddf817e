"""Wall-clock seconds of training, without compilation, evaluation and saving: the time axis of every curve."""

import os
import pathlib
import time

_STAT = pathlib.Path("/proc/self/stat")
_IMPORT_TIME = time.perf_counter()


class Clock:
    """A stopwatch that runs between `start` and `pause`; its value is saved with the checkpoint."""

    def __init__(self, seconds: float = 0.0):
        """Starts paused, at the seconds of an earlier run."""
        self._counted = seconds
        self._since: float | None = None

    def start(self) -> None:
        """Starts or continues counting."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Stops counting. Wait for the device before the call: its remaining work is training time."""
        self._counted, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        return self._counted + (0.0 if self._since is None else time.perf_counter() - self._since)


def process_start_time() -> float:
    """Start time of this process, in seconds of time.perf_counter; without /proc, the time of this import.

    A command that has restarted itself still counts as the same process.
    """
    try:
        ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])  # since the machine booted
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return _IMPORT_TIME
    return time.perf_counter() - age
