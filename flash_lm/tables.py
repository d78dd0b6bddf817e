"""Open tables: a row is a family, a head, a task, a corpus or an optimizer, of this package or of a user's module."""

import importlib
from collections import UserDict
from typing import Any, NoReturn, TypeVar

from flash_lm.errors import InputError

Row = TypeVar("Row")


class Rows(UserDict[str, Row]):
    """Rows by name. Those of the package join them when somebody reads any.

    Attributes:
        there: those that have joined so far. A module that adds rows when it is imported reads no others.
    """

    def __init__(self):
        """Without rows."""
        self.there: dict[str, Row] = {}

    @property
    def data(self) -> dict[str, Row]:  # pyright: ignore[reportIncompatibleVariableOverride] (of UserDict, of all reads)
        """All."""
        importlib.import_module("flash_lm.rows")
        return self.there

    def get(self, key: str, default: Any = None) -> Any:
        """The row, or the default; before Python 3.12 UserDict's own would ask `__missing__`."""
        return self.data.get(key, default)


class Table(Rows[Row]):
    """Rows by name; `key` is that of the config which names one."""

    def __init__(self, key: str):
        """Without rows."""
        super().__init__()
        self.key = key
        self._ours: frozenset[str] | None = None  # None: not all are there

    def register(self, name: str, row: Row) -> None:
        """Adds a row; it takes the place of one of the same name, so that a cell of a notebook may run again.

        Raises:
            InputError: the package has a row of this name.
        """
        if name in (self.there if self._ours is None else self._ours):
            raise InputError(f"{self.key}={name} is a row of flash_lm: choose another name")
        self.there[name] = row

    def seal(self) -> None:
        """The rows that are there are those of the package: a run must not mean another model with a plugin."""
        self._ours = frozenset(self.there)

    def rule(self, name: str) -> str | None:
        """What is expected of the key, or None when there is such a row."""
        return None if name in self else "one of " + ", ".join(self)

    def __missing__(self, name: str) -> NoReturn:
        """Raises InputError: there is no row of this name."""
        raise InputError(f"{self.key}={name} must be {self.rule(name)}")


FAMILIES: Table[Any] = Table("model.family")  # of models.family.Family
HEADS: Table[Any] = Table("model.head")  # of models.heads.HeadKind
TASKS: Table[Any] = Table("task")  # of data.tasks.Task
CORPORA: Table[Any] = Table("data.corpus")  # of data.corpora.CorpusKind
OPTIMIZERS: Table[Any] = Table("train.optimizer")  # of training.optimizer.Optimizer
