"""Pins each process of the queue to one core, and pauses and resumes all of them."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

from flash_lm.errors import InputError
from flash_lm.sweeps.jobs import try_lock
from studies.protocol.locks import lock_holder

_LOWEST = 19  # priority
_AUTOGROUP = pathlib.Path("/proc/self/autogroup")
_PAUSED = "paused"  # a file


@contextlib.contextmanager
def one_core(queue: pathlib.Path) -> Iterator[int]:
    """Pins this process, at the lowest priority, to a core that no other process of the queue uses; yields the core.

    Where the kernel shares out CPU time per session (autogroup), the process must lead a session for the priority to
    count.

    Args:
        queue: folder of the queue, with the lock of each core.

    Raises:
        InputError: no core is free, or the queue is paused.
    """
    _check_not_paused(queue)
    for core in sorted(os.sched_getaffinity(0)):
        with try_lock(_lock(queue, core)) as free:
            if free:
                _check_not_paused(queue)  # again, since a pause just now has not seen this process
                os.sched_setaffinity(0, {core})
                _take_lowest_priority()
                yield core
                return
    raise InputError("each core has a process of the queue already: see python -m studies status")


def _take_lowest_priority() -> None:
    """Lowers the priority of this process, and of its session where the kernel has autogroups (sched(7))."""
    os.nice(_LOWEST)
    if os.getsid(0) == os.getpid() and _AUTOGROUP.exists():
        _AUTOGROUP.write_text(str(_LOWEST), encoding="utf-8")


def is_paused(queue: pathlib.Path) -> bool:
    """Returns whether `pause` was called after the last `resume`."""
    return (queue / _PAUSED).exists()


def _check_not_paused(queue: pathlib.Path) -> None:
    if is_paused(queue):
        raise InputError("the queue is paused: run python -m studies resume first")


def pause(queue: pathlib.Path) -> list[int]:
    """Stops the processes of the queue at once (SIGSTOP) and lets none start; returns their process ids."""
    queue.mkdir(parents=True, exist_ok=True)
    (queue / _PAUSED).touch()
    return _send_signal(queue, signal.SIGSTOP)


def resume(queue: pathlib.Path) -> list[int]:
    """Lets the processes of the queue go on; returns their process ids."""
    (queue / _PAUSED).unlink(missing_ok=True)
    return _send_signal(queue, signal.SIGCONT)


def _send_signal(queue: pathlib.Path, number: signal.Signals) -> list[int]:
    """Sends a signal to each process of this machine that holds the lock of a core; returns their process ids."""
    signalled = []
    for lock in sorted(queue.glob(_lock(queue, "*").name)):
        process = lock_holder(lock)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if process is not None:
                os.kill(process, number)
                signalled.append(process)
    return signalled


def _lock(queue: pathlib.Path, core: int | str) -> pathlib.Path:
    return queue / f"core_{core}.lock"
