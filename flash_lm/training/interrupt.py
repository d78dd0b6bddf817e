"""Signal handling: the first signal finishes the step, saves and stops; a later one ends the process at once."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

# From a keyboard, a terminal that closes, a process manager, and a cluster's scheduler.
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
# A terminal that closes, and `timeout`, send a signal to the process and to its group.
_ONE_EVENT_S = 1.0


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a signal has come; restores the handlers at the end.

    A signal that the process ignores stays ignored, as SIGHUP does under nohup. A signal that comes a second or more
    after the first ends the process with 128 + its number.
    """
    stopped = False

    def handle(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    # The handlers until now, to restore them; those that ignore a signal stay.
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    # Handlers in Python wait for the main thread, which may compile for minutes: so another thread counts signals.
    numbers, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    threading.Thread(target=_exit_on_second_signal, args=(numbers,), daemon=True).start()
    wakeup_before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    for number in before:
        signal.signal(number, handle)
    try:
        yield lambda: stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup_before)
        wakeup.close()


def _exit_on_second_signal(numbers: socket.socket) -> None:
    """Reads a byte for each signal that comes, until the other end is closed."""
    with numbers:
        first = None
        while number := numbers.recv(1):
            if number[0] not in _SIGNALS:
                continue
            first = first or time.monotonic()
            if time.monotonic() - first >= _ONE_EVENT_S:
                os._exit(128 + number[0])
