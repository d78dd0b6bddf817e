"""Local copies of what lies in an object store: files that programs read at random, and files that grow.

Copies of what is read stay under ~/.cache/flash_lm/gs, in folders named like the bucket and the object; a copy is made
again when the object has changed.
"""

import contextlib
import glob
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from flash_lm.config.addresses import is_remote
from flash_lm.errors import RunError
from flash_lm.runs.storage import explain_errors, object_store, to_path, upload

_COPIES = os.path.join("~", ".cache", "flash_lm", "gs")


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where the local copy of a remote path lies, whether it exists or not; a local path itself."""
    if not is_remote(path):
        return pathlib.Path(path)
    return pathlib.Path(os.path.expanduser(_COPIES), os.fspath(to_path(path)).partition("://")[2])


def fetch(path: str | os.PathLike[str]) -> pathlib.Path:
    """Copies the objects that a path names to this machine, where they are not there already.

    Args:
        path: an object, a folder or a glob; a local path is left alone.

    Returns:
        The local path; nothing is there if there is no such object.

    Raises:
        InputError: they cannot be read.
    """
    local = local_path(path)
    if not is_remote(path):
        return local
    # What the bucket has.
    address, copies = os.fspath(to_path(path)), pathlib.Path(os.path.expanduser(_COPIES))
    with explain_errors(address):
        found = {copies / info["name"]: info for info in _list(address)}
        # What has gone from the bucket must not be read any more.
        here = [*local.rglob("*")] if local.is_dir() else map(pathlib.Path, glob.glob(str(local), recursive=True))
        for copy in here:
            if copy.is_file() and copy not in found:
                copy.unlink(missing_ok=True)
        for copy, info in found.items():
            _copy(info, copy)
    return local


def _list(address: str) -> list[dict[str, Any]]:
    """The objects that an address names."""
    store = object_store()
    if glob.has_magic(address):
        infos = store.glob(address, detail=True).values()
    else:
        infos = store.find(address, detail=True).values()
    return [info for info in infos if info["type"] == "file" and not info["name"].endswith("/")]


def _copy(info: dict[str, Any], copy: pathlib.Path) -> None:
    """Copies an object, unless the copy has its size and the time of its last change."""
    changed = datetime.fromisoformat(info["updated"])
    time_ns = int(changed.timestamp()) * 10**9 + changed.microsecond * 1000
    with contextlib.suppress(OSError):
        status = copy.stat()
        if (status.st_size, status.st_mtime_ns) == (int(info["size"]), time_ns):
            return
    copy.parent.mkdir(parents=True, exist_ok=True)
    partial = copy.with_name(f".{copy.name}-{secrets.token_hex(8)}")
    try:
        object_store().get_file(info["name"], str(partial))
        os.utime(partial, ns=(time_ns, time_ns))
        os.replace(partial, copy)
    finally:
        partial.unlink(missing_ok=True)


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
