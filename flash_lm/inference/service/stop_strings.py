"""Texts that end a generated text."""

from collections.abc import Sequence


class UpToAStop:
    """Passes a text on piece by piece, up to the stop that ends first; what may be the beginning of one waits.

    Attributes:
        found: whether a stop came.
    """

    def __init__(self, stops: Sequence[str]):
        """`stops`: texts, none of them empty."""
        self._stops, self._held, self.found = stops, "", False

    def __call__(self, text: str, last: bool = False) -> str:
        """The next piece, before a stop; after one there is none.

        Args:
            text: the next piece of the whole text.
            last: whether the text ends with it, so that nothing needs to wait.
        """
        if self.found:
            return ""
        text, self._held = self._held + text, ""
        if found := [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]:
            self.found = True
            return text[: min(found)[1]]
        if not last:
            held = max((_beginning(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text


def _beginning(text: str, stop: str) -> int:
    """How many characters at the end of a text are the longest beginning of a stop."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
