"""Modules of a user's own, whose import adds rows to the tables: families, tasks, corpora, optimizers."""

import importlib
import importlib.util
import pathlib
from collections.abc import Iterable

from flash_lm.errors import InputError, first_line


def import_plugins(names: Iterable[str], workdir: pathlib.Path | None = None) -> None:
    """Imports the modules that `config.plugins` names; one that is imported already is left as it is.

    Args:
        names: such as my_package.families.
        workdir: of the run that names them. A module of this name in there is not taken: a run is data.

    Raises:
        InputError: there is no such module, it lies in the workdir, or its import fails.
    """
    importlib.import_module("flash_lm.rows")  # which no plugin replaces
    for name in names:
        # Of the first part alone: to find a module of a package would import the package.
        top = name.partition(".")[0]
        found = importlib.util.find_spec(top) if top.isidentifier() and top != "__main__" else None
        if found is None:
            raise InputError(f"plugins={name}: there is no module {top}: install it, or put its folder on PYTHONPATH")
        places = [found.origin, *(found.submodule_search_locations or ())]
        if workdir and any(place and _lies_in(pathlib.Path(place), workdir) for place in places):
            raise InputError(f"plugins={name}: {top} lies in {workdir}, and nothing is run out of the folder of a run")
        try:
            importlib.import_module(name)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # whatever a module may do
            raise InputError(f"plugins={name}: {type(error).__name__}: {first_line(error)}") from error


def _lies_in(place: pathlib.Path, folder: pathlib.Path) -> bool:
    return place.resolve().is_relative_to(folder.resolve())
