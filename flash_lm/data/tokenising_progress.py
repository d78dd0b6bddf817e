"""The progress of tokenising: a progress line in a terminal, or a plain line now and then, with the time left."""

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

_log = logging.getLogger(__name__)
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_PLAIN_S = 30.0  # between plain lines


class Progress:
    """The progress of one split, as a context."""

    def __init__(self, name: str, total: int | None, *, shown: bool = True):
        """Begins to measure the time.

        Args:
            name: what is tokenised.
            total: bytes of text; None: it is not known.
            shown: whether this host shows it.
        """
        self._name, self._total, self._shown = name, total, shown
        self._since = self._told = time.monotonic()
        in_terminal = sys.stderr.isatty()
        self._plain = shown and not in_terminal
        about = {"desc": f"tokenise {name}", "total": total, "unit": "B", "unit_scale": True, "leave": False}
        self._bar = tqdm(**about, disable=not (shown and in_terminal))

    def __enter__(self) -> "Progress":
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes the progress line."""
        self._bar.close()

    def show(self, done: int) -> None:
        """Shows that so many bytes of text are done."""
        self._bar.update(done - self._bar.n)
        now = time.monotonic()
        if self._plain and now - self._told >= _PLAIN_S:
            self._told = now
            _log.info("tokenise %s: %s", self._name, self._describe(done, now - self._since))

    def _describe(self, done: int, seconds: float) -> str:
        if not self._total:
            return in_bytes(done)
        left = seconds / max(done, 1) * max(self._total - done, 0)
        return f"{in_bytes(done)} of {in_bytes(self._total)}, about {in_time(left)} left"


def in_bytes(count: float) -> str:
    """A number of bytes for a person.

    >>> in_bytes(2_500_000)
    '2.5 MB'
    """
    size, unit = next((x for x in _UNITS if count >= x[0]), _UNITS[-1])
    return f"{count / size:.1f} {unit}"


def in_time(seconds: float) -> str:
    """A time for a person.

    >>> in_time(50), in_time(600), in_time(9000)
    ('50 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
