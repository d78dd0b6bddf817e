"""One process trains in a folder at a time."""

import contextlib
import fcntl
import logging
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import TextIO

from flash_lm.errors import InputError
from flash_lm.training.hosts import is_first, of_all_hosts

_log = logging.getLogger(__name__)
NAME = "lock"


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Holds a run's folder; the system lets it go when the process ends, however it does.

    The folder is made if need be. If nothing has been written there, it is as before afterwards. Of several hosts the
    first one holds it.

    Raises:
        InputError: on all hosts, when another process has it.
    """
    holder, file, made, empty = None, None, False, False
    if is_first():
        made, empty = not workdir.exists(), not any(workdir.glob("*"))
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / NAME, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
        holder = _take(file)
    try:
        if holder := of_all_hosts(holder)[0]:
            raise InputError(f"{holder} is training in {workdir}: wait for its end, or choose another --workdir")
        yield
    finally:
        if file is not None:
            if not holder and empty and [path.name for path in workdir.iterdir()] == [NAME]:
                (workdir / NAME).unlink()
                if made:
                    workdir.rmdir()
            file.close()


def _take(file: TextIO) -> str | None:
    """Locks a file and writes into it who has it; says who has it already."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or "another process"
    except OSError as error:
        _log.warning("%s has no locks (%s): take care that no two runs write there", file.name, error.strerror)
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return None
