"""Counts loss spikes."""

import collections
import statistics
from collections.abc import Iterable

_WINDOW, _FEWEST, _DEVIATIONS = 64, 16, 6.0


class Spikes:
    """Counts losses more than six standard deviations above the mean of the 64 losses before.

    The first 16 losses are never spikes. Non-finite losses are not counted: they are skipped steps.

    >>> spikes = Spikes(recent=[1.0, 1.1] * 8)
    >>> spikes.update(3.0), spikes.count
    (True, 1)
    """

    def __init__(self, count: int = 0, recent: Iterable[float] = ()):
        """Continues a count; `recent` are the losses before."""
        self.count, self._recent = count, collections.deque(recent, maxlen=_WINDOW)

    @property
    def recent(self) -> list[float]:
        """The losses that the next one is compared with."""
        return list(self._recent)

    def update(self, loss: float) -> bool:
        """Takes the next loss; returns whether it is a spike."""
        is_spike = False
        if len(self._recent) >= _FEWEST:
            mean, deviation = statistics.fmean(self._recent), statistics.pstdev(self._recent)
            is_spike = loss > mean + _DEVIATIONS * deviation
        self.count += is_spike
        self._recent.append(loss)
        return is_spike
