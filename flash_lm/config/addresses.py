"""Which paths are addresses: gs://bucket/x lies in an object store, and no other scheme is read or written."""

import os
import re

_ADDRESS = re.compile(r"([a-z][a-z0-9+]+):/+")
_REMOTE = "gs"


def is_remote(path: "str | os.PathLike[str]") -> bool:
    """Whether a path is an address of an object store."""
    match = _ADDRESS.match(os.fspath(path))
    return match is not None and match[1] == _REMOTE


def address_problem(path: "str | os.PathLike[str]") -> str | None:
    """The problem of a path that is an address of another kind, such as s3://bucket/x; None: there is none."""
    match = _ADDRESS.match(text := os.fspath(path))
    if not match or match[1] == _REMOTE:
        return None
    return f"{text}: {match[1]}:// is not supported: use {_REMOTE}://, or mount it as a folder and name that"
