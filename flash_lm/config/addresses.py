"""Paths that are addresses, such as gs://bucket/x: nothing here reads or writes them."""

import os
import re

from flash_lm.errors import InputError

_ADDRESS = re.compile(r"([a-z][a-z0-9+]+):/")


def address_problem(path: "str | os.PathLike[str]") -> str | None:
    """What is wrong with a path that is an address, such as gs://bucket/x; None: it is one of this machine."""
    found = _ADDRESS.match(text := os.fspath(path))  # pathlib makes one slash of two
    advice = "is not supported: mount it as a folder (gs:// for example with gcsfuse), and name that"
    return f"{text}: {found[1]}:// {advice}" if found else None


def check_local(path: "str | os.PathLike[str]") -> None:
    """Raises InputError if a path is an address, see `address_problem`."""
    if problem := address_problem(path):
        raise InputError(problem)
