"""Lost hosts: a host that fails ends the others with one line that names it, and an exit code for the launcher.

JAX's coordination service notices the loss, and ends a process with a stack of C++ and SIGABRT. This module reads its
message before it reaches standard error.
"""

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax

from flash_lm.errors import STOPPED, first_line

HEARTBEAT_S = 30  # a host that is silent for longer is considered gone
_HELD_BACK_S = 2.0  # how long messages of libraries wait: they are dropped if a host is lost meanwhile
_FATAL = b"distributed service detected fatal errors"
_NOT_CONNECTED = b"CoordinationService/RegisterTask"  # in the same message, if hosts have not found each other
# What the coordination service says of the host that is gone; where it is not named, it is the one with the service.
_SILENT = re.compile(rb"stopped sending heartbeats\):\s*(?:\S*task:)?(\d+)")
_at_the_end = threading.Lock()
_names: list[str] = []  # of the machines, by number of the host


def report_lost_hosts() -> None:
    """Begins to watch for lost hosts, in a process that will be one of several."""
    # C's `sleep` handles SIGABRT; its argument is then the number of the signal, which leaves 6 s to report the loss.
    libc: Any = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))
    real, (read, write) = os.dup(2), os.pipe()
    # Messages of libraries go through a pipe, in which they wait.
    if sys.stderr is sys.__stderr__:  # Python's messages do not wait
        sys.stderr = os.fdopen(os.dup(real), "w", 1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)
    os.dup2(write, 2)
    os.close(write)
    messages = _Messages(real)
    for target, argument in ((messages.read, read), (messages.forward, None)):
        threading.Thread(target=target, args=(argument,) if argument else (), daemon=True).start()
    atexit.register(messages.forward_all)


def name_hosts(names: Sequence[str]) -> None:
    """Gives the names of the machines, by number of the host, for the reports."""
    _names[:] = names


@contextlib.contextmanager
def report_lost_host() -> Iterator[None]:
    """Reports the loss of another host in one clear line, instead of the network's errors."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        # Of two hosts it is the other one; of more, only the coordination service knows.
        if jax.process_count() == 2:
            _end_without(host_name(1 - jax.process_index()))
        time.sleep(HEARTBEAT_S + 15)  # until the coordination service knows which one, and ends this process
        _end_without(f"another host ({first_line(error)})")


def host_name(number: int) -> str:
    """What messages call a host: its number, and the name of its machine."""
    return f"host {number} ({_names[number]})" if number < len(_names) else f"host {number}"


def _end_without(host: str) -> NoReturn:
    _end(f"{host} is gone: start all hosts again, and the run continues from its newest checkpoint")


def _end(problem: str) -> NoReturn:
    """Ends this process at once: to end in order, it would need the host that is gone."""
    with _at_the_end:  # never released: the first report is the only one
        print(f"\nerror: {problem}", file=sys.stderr, flush=True)
        os._exit(STOPPED)


class _Messages:
    """A buffer of the messages that libraries write to standard error."""

    def __init__(self, real: int):
        """`real`: the file that standard error was."""
        self._real, self._held, self._lock = real, [], threading.Lock()

    def read(self, pipe: int) -> None:
        """Collects messages, and ends the process if one of them says that a host is gone."""
        # A message may be split between blocks, so the last ones are searched together.
        recent = b""
        while block := os.read(pipe, 1 << 16):
            recent = (recent + block)[-(1 << 16) :]
            with self._lock:
                self._held.append((time.monotonic(), block))
            if _FATAL in recent and _NOT_CONNECTED in recent:
                _end("the hosts have not all connected within five minutes: start all again, or see why one is missing")
            if _FATAL in recent:
                silent = _SILENT.findall(recent)
                _end_without(host_name(int(silent[-1]) if silent else 0))

    def forward(self) -> None:
        """Writes messages where they belong, when they have waited."""
        while True:
            time.sleep(0.1)
            self.forward_all(until=time.monotonic() - _HELD_BACK_S)

    def forward_all(self, until: float = float("inf")) -> None:
        """Writes the messages that came until then."""
        with self._lock:
            due = [block for then, block in self._held if then <= until]
            del self._held[: len(due)]
        for block in due:
            os.write(self._real, block)
