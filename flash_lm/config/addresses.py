"""Rejects paths that are addresses, such as gs://bucket/x: the package reads and writes local paths alone."""

import os
import re

from flash_lm.errors import InputError

_ADDRESS = re.compile(r"([a-z][a-z0-9+]+):/")


def address_problem(path: "str | os.PathLike[str]") -> str | None:
    """The problem of a path that is an address, such as gs://bucket/x; None: the path is local."""
    match = _ADDRESS.match(text := os.fspath(path))  # pathlib makes one slash of two
    advice = "is not supported: mount it as a folder (gs:// for example with gcsfuse), and name that"
    return f"{text}: {match[1]}:// {advice}" if match else None


def check_local(path: "str | os.PathLike[str]") -> None:
    """Raises InputError if a path is an address, see `address_problem`."""
    if problem := address_problem(path):
        raise InputError(problem)
