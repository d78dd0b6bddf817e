"""Checkpoint names: RUN, RUN@newest, RUN@best or RUN@STEP, each perhaps with @ema."""

import os
import pathlib
from typing import NamedTuple

from flash_lm.errors import InputError
from flash_lm.runs.storage import reach

NEWEST, BEST = "newest", "best"
HUB = "hub:"  # begins the name of a model on the Hugging Face hub
_EMA = "@ema"


class RunName(NamedTuple):
    """A run and one of its checkpoints.

    Attributes:
        workdir: the run's folder.
        which: newest, best, or the number of a step.
        ema: whether the average of the parameters is meant, see `train.ema`, and not the last parameters.
    """

    workdir: pathlib.Path
    which: str | int
    ema: bool = False

    def __str__(self) -> str:
        """The name as a user writes it."""
        return f"{self.workdir}{self.suffix}"

    @property
    def suffix(self) -> str:
        """The part of the name after the folder."""
        return ("" if self.which == NEWEST else f"@{self.which}") + _EMA * self.ema


def run_name(name: "str | os.PathLike[str] | RunName") -> RunName:
    """Parses a word of a command line, or a path; a folder whose name contains an @ is that folder.

    Only what follows the last / can name a checkpoint: folders above may have an @ in their names.

    Raises:
        InputError: the part after the @ is not newest, best or a step.
    """
    if isinstance(name, RunName):
        return name
    text = os.fspath(name)
    if text.endswith(_EMA) and not reach(text).is_dir():
        return run_name(text.removesuffix(_EMA))._replace(ema=True)
    # An existing folder comes before a checkpoint of another one.
    folder, at, which = text.rpartition("@")
    if not at or "/" in which or reach(text).is_dir():
        return RunName(reach(text), NEWEST)
    if not folder or not (which in (NEWEST, BEST) or (which.isascii() and which.isdecimal())):
        raise InputError(
            f"{text} must be RUN, RUN@{NEWEST}, RUN@{BEST} or RUN@STEP, such as runs/x@300, perhaps with {_EMA}"
        )
    return RunName(reach(folder), int(which) if which.isdecimal() else which)
