"""One core for each process of the queue, and pauses of all of them."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

from flash_lm.errors import InputError
from studies.protocol.jobs import begun_here
from studies.protocol.locks import holder

_LOWEST = 19  # priority
_AUTOGROUP = pathlib.Path("/proc/self/autogroup")
_PAUSED = "paused"  # a file


@contextlib.contextmanager
def one_core(queue: pathlib.Path) -> Iterator[int]:
    """Keeps this process, at the lowest priority, on a core that no other process of the queue has.

    Where the system shares out time among sessions, it must lead one of its own for that.

    Args:
        queue: folder of the queue, where the cores' locks are.

    Raises:
        InputError: there is no such core, or the queue is paused.
    """
    _check_not_paused(queue)
    for core in sorted(os.sched_getaffinity(0)):
        with begun_here(_lock(queue, core)) as free:
            if free:
                _check_not_paused(queue)  # again, since a pause just now has not seen this process
                os.sched_setaffinity(0, {core})
                _take_lowest_priority()
                yield core
                return
    raise InputError("each core has a process of the queue already: see python -m studies status")


def _take_lowest_priority() -> None:
    """Of this process, and of its session where the system shares out time among sessions first (sched(7))."""
    os.nice(_LOWEST)
    if os.getsid(0) == os.getpid() and _AUTOGROUP.exists():
        _AUTOGROUP.write_text(str(_LOWEST), encoding="utf-8")


def is_paused(queue: pathlib.Path) -> bool:
    """Whether `pause` was called after the last `resume`."""
    return (queue / _PAUSED).exists()


def _check_not_paused(queue: pathlib.Path) -> None:
    if is_paused(queue):
        raise InputError("the queue is paused: run python -m studies resume first")


def pause(queue: pathlib.Path) -> list[int]:
    """Stops the processes of the queue at once, without ending them, and lets none begin; returns their numbers."""
    queue.mkdir(parents=True, exist_ok=True)
    (queue / _PAUSED).touch()
    return _signalled(queue, signal.SIGSTOP)


def resume(queue: pathlib.Path) -> list[int]:
    """Lets the processes of the queue go on; returns their numbers."""
    (queue / _PAUSED).unlink(missing_ok=True)
    return _signalled(queue, signal.SIGCONT)


def _signalled(queue: pathlib.Path, number: signal.Signals) -> list[int]:
    """Sends a signal to each process of this machine that holds a core."""
    found = []
    for lock in sorted(queue.glob(_lock(queue, "*").name)):
        process = holder(lock)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if process is not None:
                os.kill(process, number)
                found.append(process)
    return found


def _lock(queue: pathlib.Path, core: int | str) -> pathlib.Path:
    return queue / f"core_{core}.lock"
