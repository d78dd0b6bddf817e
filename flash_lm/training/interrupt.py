"""Stops: the first signal, or a notice that the machine will be stopped, finishes the step, saves and stops.

A later signal ends the process at once.
"""

import contextlib
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from flash_lm.training.preemption import watch_for_preemption

# From a keyboard, a terminal that closes, a process manager, and a cluster's scheduler.
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
# A terminal that closes, and `timeout`, send a signal to the process and to its group.
_ONE_EVENT_S = 1.0


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a signal or a notice has come; restores the handlers at the end.

    A signal that the process ignores stays ignored, as SIGHUP does under nohup. A signal that comes a second or more
    after the first ends the process with 128 + its number. A notice is that of Google Cloud, see `preemption`.
    """
    stopped = over = False

    def handle(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    def stop_for(reason: str) -> None:
        nonlocal stopped
        if not over:
            print(f"\n{reason} ({platform.node()}): the run saves and stops", file=sys.stderr, flush=True)
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
    watch_for_preemption(stop_for)
    try:
        yield lambda: stopped
    finally:
        over = True
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
