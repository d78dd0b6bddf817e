"""Open tables: a row is a family, a head, a task, a corpus or an optimizer, of this package or of a user's module."""

from typing import Any, NoReturn, TypeVar

from flash_lm.errors import InputError

Row = TypeVar("Row")


class Table(dict[str, Row]):
    """Rows by name; `key` is that of the config which names one."""

    def __init__(self, key: str):
        """Without rows."""
        super().__init__()
        self.key = key
        self._ours: frozenset[str] = frozenset()

    def register(self, name: str, row: Row) -> None:
        """Adds a row; it takes the place of one of the same name, so that a cell of a notebook may run again.

        Raises:
            InputError: the package has a row of this name.
        """
        if name in self._ours:
            raise InputError(f"{self.key}={name} is a row of flash_lm: choose another name")
        self[name] = row

    def seal(self) -> None:
        """The rows that are there are those of the package: a run must not mean another model with a plugin."""
        self._ours = frozenset(self)

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
