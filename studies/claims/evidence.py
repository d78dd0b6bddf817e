"""The evidence for claims: the runs of studies by name and seed, and the lines of result files."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flash_lm.runs.jsonl import Line


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of a run of a study.

    Attributes:
        scores: its result lines, by split and row length.
        trained_at: the row length of training.
    """

    scores: Mapping[tuple[str, int], Line]
    trained_at: int

    def line(self, split: str, length: int | None) -> Line | None:
        """Its score on a split with rows of `length` (None: as trained)."""
        return self.scores.get((split, length or self.trained_at))


class MissingError(Exception):
    """A claim's runs or files are missing; the message says which."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was run and measured.

    Attributes:
        studies: runs by study, name and seed.
        files: the lines of result files, by path.
    """

    studies: Mapping[str, Mapping[str, Mapping[int, Run]]]
    files: Mapping[str, Sequence[Line]]

    def runs_of_common_seeds(self, study: str, *names: str) -> list[tuple[Run, ...]]:
        """Runs of a study grouped by seed, for each seed that all of them have.

        Raises:
            MissingError: there is no such seed.
        """
        runs = self.studies.get(study, {})
        if absent := [name for name in names if name not in runs]:
            raise MissingError(f"no finished run of {', '.join(absent)} in {study}")
        seeds = sorted(set.intersection(*(set(runs[name]) for name in names)))
        if not seeds:
            raise MissingError(f"no seed of all of {', '.join(names)} in {study}")
        return [tuple(runs[name][seed] for name in names) for seed in seeds]

    def value(self, path: str, key: str, wanted: Mapping[str, Any]) -> float:
        """The largest value of a key among a file's lines that match `wanted`.

        Raises:
            MissingError: there is no such line.
        """
        found = [line[key] for line in self.files.get(path, ()) if wanted.items() <= line.items() and key in line]
        if not found:
            raise MissingError(f"{path} has no {key} of {_named(wanted)}")
        return max(found)


def _named(wanted: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {x}" for key, x in wanted.items())
