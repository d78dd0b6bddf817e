"""Counts the spikes of a loss."""

import collections
import statistics
from collections.abc import Iterable

_WINDOW, _FEWEST, _DEVIATIONS = 64, 16, 6.0


class Spikes:
    """A spike is a loss more than six standard deviations above the mean of the 64 losses before it.

    The first 16 are none, and neither are losses that are not finite, which are counted as skipped steps.
    """

    def __init__(self, count: int = 0, recent: Iterable[float] = ()):
        """Continues a count; `recent`: the losses before."""
        self.count, self._recent = count, collections.deque(recent, maxlen=_WINDOW)

    @property
    def recent(self) -> list[float]:
        """The losses that the next one is compared with."""
        return list(self._recent)

    def meet(self, loss: float) -> bool:
        """Takes the next loss; returns whether it is a spike."""
        is_spike = False
        if len(self._recent) >= _FEWEST:
            mean, deviation = statistics.fmean(self._recent), statistics.pstdev(self._recent)
            is_spike = loss > mean + _DEVIATIONS * deviation
        self.count += is_spike
        self._recent.append(loss)
        return is_spike
