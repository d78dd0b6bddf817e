"""Folders on this machine's disks, or at gs:// addresses: paths of the second kind, and what differs there.

An object store has whole objects by name: none grows, no folder is renamed, and there is no lock of the system. So a
folder is written file by file, and the file that says that it is complete comes last; see also runs/local_copy.py for
files that grow or are mapped into memory, and runs/lease.py.
"""

import contextlib
import functools
import logging
import os
import pathlib
import typing
from collections.abc import Iterator
from typing import Any

from flash_lm.config.addresses import address_problem, is_remote
from flash_lm.errors import DISK_FULL, InputError, PassingError, RunError, first_line, missing_package


def to_path(name: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a name: pathlib's on this machine, and for gs:// the one of etils, which has the same methods.

    Raises:
        InputError: an address of another kind.
    """
    if problem := address_problem(text := os.fspath(name)):
        raise InputError(problem)
    if not is_remote(text):
        return pathlib.Path(text)
    _set_up()
    from etils import epath  # noqa: PLC0415 (not needed for local paths)

    scheme, _, rest = text.partition(":")
    address = f"{scheme}://{rest.strip('/')}"  # pathlib makes one slash of two
    return typing.cast(pathlib.Path, epath.Path(address))


def reach(name: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a name as `to_path`; checks that what is there can be listed, if it is an address.

    Raises:
        InputError: as `to_path`; or the client, the bucket, a right or the network is missing.
    """
    path = to_path(name)
    if is_remote(path):
        _check_access(str(path))
    return path


@functools.cache
def _set_up() -> None:
    """Settings of the libraries, before the first of them is used."""
    # One client, that of the tests: epath would prefer TensorFlow, where that is installed, and gcsfs has another one.
    for variable in ("EPATH_USE_TF", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"):
        os.environ.setdefault(variable, "false")
    # Others write between two looks, and so does TensorStore: listings are not kept.
    import fsspec.config  # noqa: PLC0415 (not needed for local paths)

    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    # Errors reach us as exceptions, and need not be logged.
    for name in ("gcsfs", "google.auth"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@functools.cache
def object_store() -> Any:
    """The file system of fsspec for gs:// addresses.

    Raises:
        InputError: its client is not installed, or nobody is logged in.
    """
    _set_up()
    import fsspec  # noqa: PLC0415 (not needed for local paths)

    try:
        return fsspec.filesystem("gcs")
    except ImportError as error:
        raise missing_package(error.name or "gcsfs", "gcs") from None


@functools.cache
def _check_access(address: str) -> None:
    bucket, _, prefix = address.partition("://")[2].partition("/")
    if not bucket:
        raise InputError(f"{address} names no bucket: write gs://BUCKET/FOLDER")
    with explain_errors(address):
        try:
            object_store().call("GET", "b/{}/o", bucket, prefix=prefix, maxResults=1)
        except FileNotFoundError:
            raise InputError(f"{address}: there is no bucket {bucket}: make it, or correct the name") from None


@contextlib.contextmanager
def explain_errors(
    path: str | os.PathLike[str], kind: type[InputError] | type[RunError] = InputError
) -> Iterator[None]:
    """Turns an error of the object store into one line; errors of this machine are left alone.

    Raises:
        InputError, RunError: `kind`, instead of the client's exceptions; for RunError a PassingError, if the store
            cannot be reached.
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:  # the client, its HTTP library and its login have no common class
        module = type(error).__module__.partition(".")[0]
        if not is_remote(path) or not (isinstance(error, OSError) or module in ("gcsfs", "aiohttp", "google")):
            raise
        if isinstance(error, OSError) and (error.errno in DISK_FULL or error.filename is not None):
            raise  # of a file of this machine
        text = first_line(error)
        if "Forbidden" in text or getattr(error, "code", None) in (401, 403):
            raise kind(
                f"{path}: no right to do this: log in with gcloud auth application-default login, and give the account "
                "the roles Storage Object User and Storage Legacy Bucket Reader on the bucket"
            ) from None
        kind = PassingError if kind is RunError else kind
        raise kind(f"{path} cannot be reached ({text}): check login, project and network, and try again") from None


def check_bucket(path: pathlib.Path) -> None:
    """Checks that the properties of a bucket can be read, which Orbax does when it saves.

    Raises:
        InputError: they cannot, or the bucket cannot be reached.
    """
    with explain_errors(path):
        object_store().call("GET", "b/{}", str(path).split("/")[2])


def absolute(path: pathlib.Path) -> pathlib.Path:
    """A path from the root, or an address."""
    return path if is_remote(path) else path.absolute()


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a small file completely or not at all."""
    if is_remote(path):
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def is_complete(folder: pathlib.Path, last: str) -> bool:
    """Whether a folder exists, and in an object store has the file that is written last."""
    return (folder / last if is_remote(folder) else folder).exists()


def upload_folder(source: pathlib.Path, target: pathlib.Path, last: str | None = None) -> None:
    """Copies the files of a local folder into a remote one; the file `last` comes after all others.

    Raises:
        InputError: they cannot be written.
    """
    files = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.name == last)
    with explain_errors(target):
        for file in files:
            upload(file, target / file.relative_to(source).as_posix())


def upload(file: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a local file to an object."""
    object_store().put_file(str(file), str(target))


def objects(folder: pathlib.Path) -> list[str]:
    """The names of the objects of a remote folder, relative to it."""
    root = str(folder).partition("://")[2] + "/"
    return [name.removeprefix(root) for name in object_store().find(str(folder)) if name.startswith(root)]


def remove_folder(folder: pathlib.Path) -> None:
    """Removes the objects of a remote folder, if there are any."""
    for name in objects(folder):  # one by one: `rm` takes names for globs
        object_store().rm_file(f"{folder}/{name}")


def move_folder(source: pathlib.Path, target: pathlib.Path) -> None:
    """Renames a folder; in an object store its objects are copied, and then removed."""
    if is_remote(source):
        names = objects(source)  # lists of names are no globs
        object_store().mv([f"{source}/{name}" for name in names], [f"{target}/{name}" for name in names])
        return
    target.parent.mkdir(exist_ok=True)
    os.replace(source, target)


@contextlib.contextmanager
def fill_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write files into, and renames it to `target`; a remote one is written in place."""
    if is_remote(target):
        yield target
        return
    partial = target.with_name(f"{target.name}.partial")
    yield partial
    os.replace(partial, target)
