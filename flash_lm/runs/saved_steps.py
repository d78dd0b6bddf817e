"""The checkpoints in a run's folder, found without JAX."""

import pathlib
import re

from flash_lm.config.addresses import is_remote
from flash_lm.runs.storage import absolute, objects

_COMMITTED = "/commit_success.txt"


def checkpoint_folder(workdir: pathlib.Path) -> pathlib.Path:
    """The folder of a run's checkpoints; each is a subfolder named after its step."""
    return absolute(workdir) / "checkpoints"


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """Steps of all checkpoints, intact or not, in ascending order."""
    folder = checkpoint_folder(workdir)
    # In an object store Orbax writes a checkpoint in place, and this file last; it removes what has none.
    if is_remote(workdir):
        names = [name.removesuffix(_COMMITTED) for name in objects(folder) if name.endswith(_COMMITTED)]
    else:
        names = [path.name for path in folder.glob("*")]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))
