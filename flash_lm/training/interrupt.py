"""SIGINT and SIGTERM: finish the step, save and stop. A second signal ends the process at once."""

import contextlib
import signal
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a signal has come; restores the handlers at the end."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    stopped = False

    def handle(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield lambda: stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
