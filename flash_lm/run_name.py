"""How a checkpoint is named wherever a run is: RUN, RUN@newest, RUN@best or RUN@STEP."""

import os
import pathlib
from typing import NamedTuple

from flash_lm.errors import InputError

NEWEST, BEST = "newest", "best"


class RunName(NamedTuple):
    """A run, and which of its checkpoints is meant.

    Attributes:
        workdir: of the run.
        which: newest, best, or the number of a step.
    """

    workdir: pathlib.Path
    which: str | int

    def __str__(self) -> str:
        """As it is written."""
        return str(self.workdir) if self.which == NEWEST else f"{self.workdir}@{self.which}"


def run_name(name: "str | os.PathLike[str] | RunName") -> RunName:
    """What a word of a command, or a path, names; a folder whose own name has an @ is that folder.

    Raises:
        InputError: something else comes after the @.
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
