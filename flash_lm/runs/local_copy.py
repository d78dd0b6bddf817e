"""Local copies of what lies in an object store: files that programs read at random, and files that grow.

Copies of what is read stay under ~/.cache/flash_lm/gs, in folders named like the bucket and the object; a copy is made
again when the object has changed.
"""

import contextlib
import glob
import logging
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from flash_lm.config.addresses import is_remote
from flash_lm.errors import InputError, RunError
from flash_lm.runs.storage import explain_errors, object_store, reach, upload, upload_folder

_log = logging.getLogger(__name__)
_COPIES = os.path.join("~", ".cache", "flash_lm", "gs")
_MENTIONED = 10**8  # bytes; less is copied without a message


def copy_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where the local copy of a remote path lies, whether it exists or not; a local path itself."""
    if not is_remote(path):
        return pathlib.Path(path)
    return pathlib.Path(os.path.expanduser(_COPIES), os.fspath(reach(path)).partition("://")[2])


def fetch(path: str | os.PathLike[str], *, or_glob: bool = False) -> pathlib.Path:
    """Copies the objects that a path names to this machine, where they are not there already.

    Args:
        path: an object or a folder; a local path is left alone.
        or_glob: if there is no such object or folder, the path is a glob.

    Returns:
        The local path; nothing is there if there is no such object.

    Raises:
        InputError: they cannot be read.
    """
    local = copy_path(path)
    if not is_remote(path):
        return local
    # What the bucket has.
    address, copies = os.fspath(reach(path)), pathlib.Path(os.path.expanduser(_COPIES))
    with explain_errors(address):
        found = {copies / info["name"]: info for info in _list(address, or_glob)}
        # What has gone from the bucket must not be read any more.
        for copy in _copies_here(local, or_glob):
            if copy.is_file() and copy not in found and not copy.name.startswith("."):  # what another process copies
                copy.unlink(missing_ok=True)
        _copy({copy: info for copy, info in found.items() if not _is_current(copy, info)}, address)
    return local


def upload_copies(folder: pathlib.Path, last: str) -> None:
    """Copies the files of a remote folder's local copy to it, the file `last` after all others.

    Raises:
        InputError: they cannot be written.
    """
    upload_folder(copy_path(folder), folder, last)
    # They are current, and need not be copied back.
    copies = pathlib.Path(os.path.expanduser(_COPIES))
    with explain_errors(folder):
        for info in _list(os.fspath(folder)):
            if (copy := copies / info["name"]).exists() and copy.stat().st_size == int(info["size"]):
                _set_time(copy, info)


def _copies_here(local: pathlib.Path, or_glob: bool) -> list[pathlib.Path]:
    """What lies at the local path of an address."""
    if local.is_dir():
        return [*local.rglob("*")]
    if local.exists() or not or_glob:
        return [local]
    return [pathlib.Path(path) for path in glob.glob(str(local), recursive=True)]


def _list(address: str, or_glob: bool = False) -> list[dict[str, Any]]:
    """The objects that an address names."""
    store = object_store()
    infos = store.find(address, detail=True)
    if not infos and or_glob and glob.has_magic(address):
        infos = store.glob(address, detail=True)
    files = [info for info in infos.values() if info["type"] == "file" and not info["name"].endswith("/")]
    # The bucket may be somebody else's, and its names become paths on this machine.
    if unsafe := [info["name"] for info in files if ".." in info["name"].split("/")]:
        raise InputError(f"gs://{unsafe[0]} leads out of its folder on this machine: rename the object")
    return files


def _is_current(copy: pathlib.Path, info: dict[str, Any]) -> bool:
    """Whether a copy has the size of its object, and the time of its last change."""
    try:
        status = copy.stat()
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (int(info["size"]), _changed_ns(info))


def _changed_ns(info: dict[str, Any]) -> int:
    changed = datetime.fromisoformat(info["updated"])
    return int(changed.timestamp()) * 10**9 + changed.microsecond * 1000


def _set_time(copy: pathlib.Path, info: dict[str, Any]) -> None:
    """Gives a copy the time of its object's last change."""
    os.utime(copy, ns=(_changed_ns(info), _changed_ns(info)))


def _copy(found: dict[pathlib.Path, dict[str, Any]], address: str) -> None:
    """Copies objects; each file gets its name when it is complete, since other processes may read it."""
    size = sum(int(info["size"]) for info in found.values())
    if size > _MENTIONED:
        _log.info("copying %.1f GB of %s to %s", size / 10**9, address, _COPIES)
    partial = {copy: copy.with_name(f".{copy.name}-{secrets.token_hex(8)}") for copy in found}
    for copy in found:
        copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        object_store().get([info["name"] for info in found.values()], [str(path) for path in partial.values()])
        for copy, info in found.items():
            _set_time(partial[copy], info)
            os.replace(partial[copy], copy)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


class GrowingFiles:
    """The files of a folder to which a run appends; in an object store, `upload` writes them as a whole.

    Attributes:
        folder: where to write them: the folder itself, or a temporary one on this machine.
        remote: whether it is a temporary one.
    """

    def __init__(self, target: pathlib.Path, existing: Sequence[str] = ()):
        """Begins with the present content of these files of a remote folder."""
        self.folder, self._target, self.remote = target, target, is_remote(target)
        self._uploaded: dict[pathlib.Path, tuple[int, int]] = {}
        if self.remote:
            self.folder = pathlib.Path(tempfile.mkdtemp(prefix="flash_lm-"))
            for name in existing:
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / name).write_bytes((target / name).read_bytes())

    def upload(self) -> None:
        """Writes the files that have changed to the object store; does nothing for a local folder.

        Raises:
            RunError: it cannot be reached, or there is no right to write.
        """
        if not self.remote:
            return
        with explain_errors(self._target, RunError):
            for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                state = path.stat().st_size, path.stat().st_mtime_ns
                if self._uploaded.get(path) != state:
                    upload(path, self._target / path.relative_to(self.folder).as_posix())
                    self._uploaded[path] = state

    def close(self) -> None:
        """Removes the temporary folder."""
        if self.remote:
            shutil.rmtree(self.folder, ignore_errors=True)
