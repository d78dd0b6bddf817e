"""A user's own modules, which add rows to the tables when imported: families, tasks, corpora, optimizers."""

import importlib
import importlib.util
import pathlib
from collections.abc import Iterable

from flash_lm.errors import InputError, first_line


def import_plugins(names: Iterable[str], workdir: pathlib.Path | None = None) -> None:
    """Imports the modules that `config.plugins` names; a module that is already imported is not imported again.

    Args:
        names: module names such as my_package.families.
        workdir: the workdir of the run that names them. A module inside it is not imported: a run is data.

    Raises:
        InputError: there is no such module, it is in the workdir, or its import fails.
    """
    importlib.import_module("flash_lm.rows")  # before any plugin, so that none replaces a row
    for name in names:
        # Only of the first part: to find a module of a package would import the package.
        top = name.partition(".")[0]
        found = importlib.util.find_spec(top) if top.isidentifier() and top != "__main__" else None
        if found is None:
            raise InputError(f"plugins={name}: there is no module {top}: install it, or put its folder on PYTHONPATH")
        places = [found.origin, *(found.submodule_search_locations or ())]
        if workdir and any(place and _lies_in(pathlib.Path(place), workdir) for place in places):
            raise InputError(f"plugins={name}: {top} is in {workdir}, and code in a run's folder is never executed")
        try:
            importlib.import_module(name)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # a module may do anything
            raise InputError(f"plugins={name}: {type(error).__name__}: {first_line(error)}") from error


def _lies_in(place: pathlib.Path, folder: pathlib.Path) -> bool:
    return place.resolve().is_relative_to(folder.resolve())
