"""Plugins: modules of the user, which register families, tasks, corpora or optimizers when imported.

Importing a module runs it. So only modules are imported that the user has named: in a command, a call, or a config
file, which is Python itself. The config.json of a run or an export is data, and may come from somebody else.
"""

import importlib
import importlib.util
import pathlib
from collections.abc import Iterable
from typing import Any

from flash_lm.config.registry import fill
from flash_lm.errors import InputError, first_line

_LONGEST = 200  # characters of names that an error repeats
_named: set[str] = set()  # by the user, since the process began


def import_plugins(names: Iterable[str]) -> None:
    """Imports modules that the user has named; a module that is already imported is not imported again.

    Args:
        names: module names such as my_package.families.

    Raises:
        InputError: no such module exists, or its import fails.
    """
    fill()  # before any plugin, so that none replaces a row
    for name in names:
        # Only of the first part: to find a module of a package would import the package.
        top = name.partition(".")[0]
        if not top.isidentifier() or top == "__main__" or importlib.util.find_spec(top) is None:
            raise InputError(f"plugins={name}: there is no module {top}: install it, or put its folder on PYTHONPATH")
        try:
            importlib.import_module(name)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # a module may do anything
            raise InputError(f"plugins={name}: {type(error).__name__}: {first_line(error)}") from error
        _named.add(name)


def check_plugins(names: Iterable[str], folder: pathlib.Path) -> None:
    """Checks that the user has named the plugins which the config of a folder asks for, so that they are imported.

    Raises:
        InputError: some are not named, and how to name them; or some are no names of modules.
    """
    fill()  # the config is read with their keys
    names = list(names)
    if wrong := [name for name in names if not all(part.isidentifier() for part in name.split("."))]:
        # Nobody should copy such a name from an error into a command line.
        raise InputError(f"{folder} asks for plugins={wrong[0]!r:.80}, which is no module: restore its config.json")
    # A config that somebody else may have written runs no code by itself.
    if missing := [name for name in names if name not in _named]:
        asked = ",".join(missing)[:_LONGEST]
        line = (
            f"{folder} asks for plugins={asked}, and loading runs no code that you have not named: if you trust them, "
            f"add --plugins={asked} (train and sweep: --config.plugins={asked}; flash_lm.load: plugins=[…])"
        )
        raise InputError.of([line])


def plugin_names(values: dict[str, Any]) -> tuple[str, ...]:
    """The modules that a config names; names of the wrong type are left out."""
    names = values.get("plugins")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, tuple | list) else ()
