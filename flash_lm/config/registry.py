"""Registries of families, heads, tasks, corpora, optimizers and others, from this package or a user's module."""

import importlib
from collections import UserDict
from typing import Any, NoReturn, TypeVar

from flash_lm.errors import InputError, one_of_names

Row = TypeVar("Row")


def fill() -> None:
    """Imports the built-in entries, which stand above this room: the one import of the package that points up.

    Without it the registries would hold only what happened to be imported.
    """
    importlib.import_module("flash_lm.builtin")


class Rows(UserDict[str, Row]):
    """A dict of entries by name. The built-in entries are added when an entry is first read.

    Attributes:
        registered: the rows added so far. A module that adds rows when it is imported does not read others.
    """

    def __init__(self):
        """Starts without rows."""
        self.registered: dict[str, Row] = {}

    @property
    def data(self) -> dict[str, Row]:  # pyright: ignore[reportIncompatibleVariableOverride] (UserDict reads it)
        """All rows."""
        fill()
        return self.registered

    def get(self, key: str, default: Any = None) -> Any:
        """The row, or the default; before Python 3.12 UserDict's method would call `__missing__`."""
        return self.data.get(key, default)


class Table(Rows[Row]):
    """A registry: entries by name; `key` is the config key that selects one."""

    def __init__(self, key: str):
        """Starts without rows."""
        super().__init__()
        self.key = key
        self._ours: frozenset[str] | None = None  # None: not sealed yet

    def register(self, name: str, row: Row) -> None:
        """Adds a row; it replaces a row of the same name, so that a notebook cell may run again.

        Raises:
            InputError: the package has a row with this name.
        """
        if name in (self.registered if self._ours is None else self._ours):
            raise InputError(f"{self.key}={name} is a name of flash_lm: choose another one")
        self.registered[name] = row

    def seal(self) -> None:
        """Marks the present rows as built in, so that no plugin may replace them: runs must keep their meaning."""
        self._ours = frozenset(self.registered)

    def rule(self, name: str) -> str | None:
        """The values that the key may have, or None if this name is registered."""
        return one_of_names(name, self)

    def __missing__(self, name: str) -> NoReturn:
        """Raises InputError: no row has this name."""
        raise InputError(f"{self.key}={name} must be {self.rule(name)}")


FAMILIES: Table[Any] = Table("model.family")  # of families.family.Family
HEADS: Table[Any] = Table("model.head")  # of models.output_heads.HeadKind
TASKS: Table[Any] = Table("task")  # of data.tasks.Task
CORPORA: Table[Any] = Table("data.corpus")  # of data.corpora.CorpusKind
OPTIMIZERS: Table[Any] = Table("train.optimizer")  # of training.optimizer.Optimizer
LOGGERS: Table[Any] = Table("train.log_to")  # functions of training.loggers.LoggedRun that return a Logger
FORMATS: Table[Any] = Table("--format")  # of models.formats.format.Format
