"""Finds the process that holds a lock, without taking the lock."""

import pathlib
import re

_LOCKS = pathlib.Path("/proc/locks")
_FLOCK = re.compile(r"FLOCK +ADVISORY +WRITE +(\d+) +[\da-f]+:[\da-f]+:(\d+) ")


def lock_holder(path: pathlib.Path) -> int | None:
    """Returns the id of the process of this machine that holds the lock of a file; None: unlocked, or no such file."""
    if not path.exists():
        return None
    inode = path.stat().st_ino
    held = {int(number): int(process) for process, number in _FLOCK.findall(_LOCKS.read_text(encoding="utf-8"))}
    process = held.get(inode)
    # Files of two disks may share an inode number, so the file must name the process, too.
    return process if process and path.read_text(encoding="utf-8").startswith(f"process {process} ") else None
