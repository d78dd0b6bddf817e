"""The lock of a run's folder: only one process trains in it at a time."""

import contextlib
import glob
import logging
import os
import pathlib
import platform
import threading
from collections.abc import Callable, Iterator

from filelock import FileLock, Timeout

from flash_lm.config.addresses import is_remote
from flash_lm.errors import InputError, PassingError
from flash_lm.runs.hosts import gather_from_hosts, is_first, on_all_hosts
from flash_lm.runs.lease import Lease
from flash_lm.runs.storage import absolute, check_bucket

_log = logging.getLogger(__name__)
NAME = "lock"


@contextlib.contextmanager
def lock_folder(workdir: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Locks a run's folder: a local one by its lock file, one in an object store by a lease.

    If nothing was written to the folder, it is left as it was. With several hosts, the first one holds the lock.

    Yields:
        A function to call before anything is written; it raises RunError if the lock has been lost.

    Raises:
        PassingError: on all hosts, if another process holds the lock.
        InputError: on all hosts, if the folder cannot be written, or its path is like a glob.
    """
    # Orbax joins the parts of a checkpoint that it finds with such a glob: nothing would restore.
    if glob.has_magic(os.fspath(absolute(workdir))):
        raise InputError(f"{workdir}: Orbax takes [, * and ? in a run's path for a glob: choose another --workdir")
    lock = (_lease if is_remote(workdir) else _lock_file)(workdir)
    with contextlib.ExitStack() as stack:
        holder, check = on_all_hosts(lambda: stack.enter_context(lock))
        if holder := gather_from_hosts(holder)[0]:
            raise PassingError(f"{holder} is training in {workdir}: wait for it to end, or choose another --workdir")
        yield check


@contextlib.contextmanager
def _lease(workdir: pathlib.Path) -> Iterator[tuple[str | None, Callable[[], None]]]:
    """Takes the lease of a remote folder, and renews it; yields who holds it instead, and its check."""
    if not is_first():
        yield None, _nothing_to_check
        return
    check_bucket(workdir)
    lease = Lease(workdir / NAME)
    holder = lease.take()
    if holder is None:
        threading.Thread(target=lease.keep, daemon=True).start()
    try:
        yield holder, lease.check
    finally:
        if holder is None:
            lease.release()


@contextlib.contextmanager
def _lock_file(workdir: pathlib.Path) -> Iterator[tuple[str | None, Callable[[], None]]]:
    """Locks a local folder, which is created if necessary; the system releases it when the process ends."""
    # The first host takes the lock, and tells the others who holds it.
    if not is_first():
        yield None, _nothing_to_check
        return
    made, empty = not workdir.exists(), not any(workdir.glob("*"))
    workdir.mkdir(parents=True, exist_ok=True)
    with hold(workdir / NAME) as holder:
        try:
            yield holder, _nothing_to_check
        finally:
            # A folder without a run is left as it was.
            if not holder and empty and [path.name for path in workdir.iterdir()] == [NAME]:
                (workdir / NAME).unlink()
                if made:
                    workdir.rmdir()


def _nothing_to_check() -> None:
    """The system keeps a lock as long as the process lives."""


@contextlib.contextmanager
def hold(path: pathlib.Path) -> Iterator[str | None]:
    """Holds the lock of a file until the block or the process ends; yields who holds it instead, if anybody does."""
    path.open("a").close()  # raises if it cannot be written
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        # The text of the file says who.
        yield path.read_text(encoding="utf-8").strip() or "another process"
        return
    except OSError as error:  # of a disk that has no locks
        _log.warning("%s cannot be locked (%s): make sure that no other run writes there", path, error.strerror)
        yield None
        return
    try:
        path.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield None
    finally:
        lock.release()
