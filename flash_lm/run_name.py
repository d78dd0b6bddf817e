"""Names of checkpoints: RUN, RUN@newest, RUN@best or RUN@STEP."""

import os
import pathlib
from typing import NamedTuple

from flash_lm.errors import InputError

NEWEST, BEST = "newest", "best"


class RunName(NamedTuple):
    """A run and one of its checkpoints.

    Attributes:
        workdir: the run's folder.
        which: newest, best, or the number of a step.
    """

    workdir: pathlib.Path
    which: str | int

    def __str__(self) -> str:
        """The name as a user writes it."""
        return str(self.workdir) if self.which == NEWEST else f"{self.workdir}@{self.which}"


def run_name(name: "str | os.PathLike[str] | RunName") -> RunName:
    """Parses a word of a command line, or a path; a folder whose own name contains an @ is that folder.

    Raises:
        InputError: the part after the @ is not newest, best or a step.
    """
    if isinstance(name, RunName):
        return name
    text = os.fspath(name)
    folder, at, which = text.rpartition("@")
    if not at or pathlib.Path(text).is_dir():
        return RunName(pathlib.Path(text), NEWEST)
    if not folder or not (which in (NEWEST, BEST) or (which.isascii() and which.isdecimal())):
        raise InputError(f"{text} must be RUN, RUN@{NEWEST}, RUN@{BEST} or RUN@STEP, such as runs/x@300")
    return RunName(pathlib.Path(folder), int(which) if which.isdecimal() else which)
