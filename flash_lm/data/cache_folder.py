"""Folders of the cache: written completely or not at all, loaded by any process, and made again when damaged.

One in an object store is copied to this machine, or made here and uploaded; its last object says that it is complete.
"""

import contextlib
import logging
import os
import pathlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from flash_lm.config.addresses import is_remote
from flash_lm.errors import InputError
from flash_lm.runs.hosts import gather_from_hosts, is_first, on_all_hosts
from flash_lm.runs.local_copy import copy_path, fetch, upload_copies
from flash_lm.runs.storage import is_complete, remove_folder

_log = logging.getLogger(__name__)
Made = TypeVar("Made")
# What reading truncated, empty or modified files raises.
DAMAGED = (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, InputError)
COMPLETE = "complete"  # an empty file of a folder in an object store
_SEEN_S = 60.0  # until a new folder on a network's disk is seen everywhere


def load_or_make(
    folder: pathlib.Path, make: Callable[[pathlib.Path], None], load: Callable[[pathlib.Path], Made]
) -> Made:
    """Loads a folder that `make` has written, now or earlier."""
    if is_remote(folder):
        made = _load_intact(fetch(folder), load) if is_complete(folder, COMPLETE) else None
        if made is None:
            made = load_or_make(copy_path(folder), make, load)
            _upload(folder)
        return made
    for _ in range(3):  # another process may find it damaged and remove it before it is read
        if (made := _load_intact(folder, load)) is not None:
            return made
        with _atomic_folder(folder) as partial:
            make(partial)
    return load(folder)


def load_or_make_on_hosts(
    folder: pathlib.Path,
    make: Callable[[pathlib.Path], None],
    make_on_hosts: Callable[[pathlib.Path, pathlib.Path], None],
    load: Callable[[pathlib.Path], Made],
) -> Made:
    """As `load_or_make`, by all hosts together.

    Args:
        folder: the folder.
        make: writes it on one host; for hosts that do not share the cache.
        make_on_hosts: writes it on all hosts together: into a folder on this machine, whose files matter on the first
            host, with another one through which hosts exchange files. On a shared disk they are the same.
        load: loads it.

    Raises:
        InputError, RunError: a host has failed.
    """
    remote = is_remote(folder)
    if not remote:
        folder.parent.mkdir(parents=True, exist_ok=True)
    made = None if remote and not is_complete(folder, COMPLETE) else _load_intact(fetch(folder), load)
    if all(gather_from_hosts(made is not None)):
        assert made is not None
        return made
    if not remote and not _is_shared(folder.parent):
        if is_first():
            _log.warning(
                "data.cache_dir=%s is not the same folder on all hosts: each makes %s; name one that they share, to "
                "divide the work",
                folder.parent,
                folder.name,
            )
        return load_or_make(folder, make, load)
    # All write into one folder, which the first host renames at the end.
    shared = folder.parent / gather_from_hosts(f".{folder.name}-{secrets.token_hex(8)}")[0]
    partial = copy_path(shared)
    try:
        on_all_hosts(lambda: partial.mkdir(parents=True, exist_ok=True))
        on_all_hosts(lambda: make_on_hosts(partial, shared))
        on_all_hosts(lambda: _publish(partial, folder) if is_first() else None)
    finally:
        if remote or is_first():
            shutil.rmtree(partial, ignore_errors=True)
        if remote and is_first():
            remove_folder(shared)
    return on_all_hosts(lambda: load(_wait_for(folder)))


def _load_intact(folder: pathlib.Path, load: Callable[[pathlib.Path], Made]) -> Made | None:
    """What a folder has; None: it does not exist, or it was damaged, and is removed."""
    if not _exists(folder):
        return None
    try:
        return load(folder)
    except DAMAGED as error:
        _log.warning("%s is damaged, making it again: %s", folder, error)
        _remove(folder)
        return None


def _exists(path: pathlib.Path) -> bool:
    # Listed, because a network's disk may remember for a minute that a name did not exist.
    return path.parent.exists() and path.name in os.listdir(path.parent)


def _wait_for(folder: pathlib.Path) -> pathlib.Path:
    """The folder on this machine, when it is seen here."""
    deadline = time.monotonic() + _SEEN_S
    while not is_remote(folder) and not _exists(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    return fetch(folder)


def _is_shared(folder: pathlib.Path) -> bool:
    """Whether all hosts see the same folder."""
    file = folder / gather_from_hosts(f".{secrets.token_hex(8)}")[0]
    on_all_hosts(lambda: file.touch() if is_first() else None)
    shared = all(gather_from_hosts(_exists(file)))
    if is_first():
        file.unlink()
    return shared


def _upload(folder: pathlib.Path) -> None:
    """Copies a complete folder of this machine to the object store."""
    (copy_path(folder) / COMPLETE).touch()
    upload_copies(folder, COMPLETE)


def _publish(partial: pathlib.Path, folder: pathlib.Path) -> None:
    """Gives a complete folder its name, and uploads it."""
    if is_remote(folder):
        _remove(copy_path(folder))  # a copy of an earlier one
    _rename(partial, copy_path(folder))
    if is_remote(folder):
        _upload(folder)


def _rename(partial: pathlib.Path, folder: pathlib.Path) -> None:
    try:
        os.replace(partial, folder)
    except OSError:
        # Another process made the same folder in the meantime; the key is a hash of the content, so either will do.
        if not folder.exists():
            raise


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder atomically, so that no process finds a part of it; another process may do the same."""
    aside = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder, aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _atomic_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary folder that becomes `folder` at the end, or is removed after an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's, which only its owner can read: the user's umask says who shares the cache.
    partial = folder.parent / f".{folder.name}-{secrets.token_hex(8)}"
    partial.mkdir()
    try:
        yield partial
        _rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
