"""The lock file of a run's folder: only one process trains in it at a time."""

import contextlib
import fcntl
import logging
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import TextIO

from flash_lm.errors import InputError
from flash_lm.runs.hosts import gather_from_hosts, is_first

_log = logging.getLogger(__name__)
NAME = "lock"


@contextlib.contextmanager
def lock_folder(workdir: pathlib.Path) -> Iterator[None]:
    """Locks a run's folder; the system releases the lock when the process ends, even after a crash.

    The folder is created if necessary. If nothing was written to it, it is left as it was. With several hosts, the
    first one holds the lock.

    Raises:
        InputError: on all hosts, if another process holds the lock.
    """
    holder, file, made, empty = None, None, False, False
    # The first host takes the lock, and tells the others who holds it.
    if is_first():
        made, empty = not workdir.exists(), not any(workdir.glob("*"))
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / NAME, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
        holder = take(file)
    try:
        if holder := gather_from_hosts(holder)[0]:
            raise InputError(f"{holder} is training in {workdir}: wait for it to end, or choose another --workdir")
        yield
    finally:
        # A folder without a run is left as it was.
        if file is not None:
            if not holder and empty and [path.name for path in workdir.iterdir()] == [NAME]:
                (workdir / NAME).unlink()
                if made:
                    workdir.rmdir()
            file.close()


def take(file: TextIO) -> str | None:
    """Locks an open file until it is closed, and writes the holder into it; if it is locked, returns the holder."""
    # The lock belongs to the open file, so it ends with the process; its text says who holds it.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or "another process"
    except OSError as error:
        _log.warning("%s cannot be locked (%s): make sure that no other run writes there", file.name, error.strerror)
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return None
