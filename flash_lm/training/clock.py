"""Host seconds of training, without compilation, evaluation and saving: the time axis of every curve."""

import time


class Clock:
    """Runs between `start` and `pause`; what it has counted is kept beside the checkpoint."""

    def __init__(self, seconds: float = 0.0):
        """Starts paused, at what an earlier run had counted."""
        self._counted = seconds
        self._since: float | None = None

    def start(self) -> None:
        """Goes on counting."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Stops counting. Wait for the device first: what it still has to do is training."""
        self._counted, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Counted so far."""
        return self._counted + (0.0 if self._since is None else time.perf_counter() - self._since)
