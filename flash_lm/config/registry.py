"""Open tables: a row is a family, a head, a task, a corpus or an optimizer, from this package or a user's module."""

import importlib
from collections import UserDict
from typing import Any, NoReturn, TypeVar

from flash_lm.errors import InputError

Row = TypeVar("Row")


def fill() -> None:
    """Imports the package's own rows, which stand above this room: the one import of the package that points up.

    Without it the tables would hold only what happened to be imported.
    """
    importlib.import_module("flash_lm.builtin")


class Rows(UserDict[str, Row]):
    """Rows by name. The package's own rows are added when a row is first read.

    Attributes:
        there: the rows added so far. A module that adds rows when it is imported does not read others.
    """

    def __init__(self):
        """Starts without rows."""
        self.there: dict[str, Row] = {}

    @property
    def data(self) -> dict[str, Row]:  # pyright: ignore[reportIncompatibleVariableOverride] (UserDict reads it)
        """All rows."""
        fill()
        return self.there

    def get(self, key: str, default: Any = None) -> Any:
        """The row, or the default; before Python 3.12 UserDict's own method would call `__missing__`."""
        return self.data.get(key, default)


class Table(Rows[Row]):
    """Rows by name; `key` is the config key that selects one."""

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
        if name in (self.there if self._ours is None else self._ours):
            raise InputError(f"{self.key}={name} is a row of flash_lm: choose another name")
        self.there[name] = row

    def seal(self) -> None:
        """Marks the present rows as the package's own, which no plugin may replace: runs must keep their meaning."""
        self._ours = frozenset(self.there)

    def rule(self, name: str) -> str | None:
        """What is expected of the key, or None if there is such a row."""
        return None if name in self else "one of " + ", ".join(self)

    def __missing__(self, name: str) -> NoReturn:
        """Raises InputError: there is no row with this name."""
        raise InputError(f"{self.key}={name} must be {self.rule(name)}")


FAMILIES: Table[Any] = Table("model.family")  # of families.family.Family
HEADS: Table[Any] = Table("model.head")  # of models.output_heads.HeadKind
TASKS: Table[Any] = Table("task")  # of data.tasks.Task
CORPORA: Table[Any] = Table("data.corpus")  # of data.corpora.CorpusKind
OPTIMIZERS: Table[Any] = Table("train.optimizer")  # of training.optimizer.Optimizer
