"""Stop strings: cut a generated text off before the first of them."""

from collections.abc import Sequence


class StopStringFilter:
    """Filters a stream of text up to the stop string that ends first; a possible beginning of one is held back.

    >>> stop = StopStringFilter(["END"])
    >>> stop("one E"), stop("ND two"), stop.stopped
    ('one ', '', True)

    Attributes:
        stopped: whether a stop string came.
    """

    def __init__(self, stops: Sequence[str]):
        """`stops` are texts, none of them empty."""
        self._stops, self._held, self.stopped = stops, "", False

    def __call__(self, text: str, last: bool = False) -> str:
        """Returns the next piece of filtered text; it is empty after a stop string.

        Args:
            text: the next piece of the unfiltered text.
            last: whether the text ends with it, so that nothing is held back.
        """
        if self.stopped:
            return ""
        # The stop string that ends first counts, however the text was cut into pieces.
        text, self._held = self._held + text, ""
        if ends := [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]:
            self.stopped = True
            return text[: min(ends)[1]]
        # Hold back the end of the text if it may be the beginning of a stop string.
        if not last:
            held = max((_partial_stop(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text


def _partial_stop(text: str, stop: str) -> int:
    """Length of the longest end of a text that is the beginning of a stop string."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
