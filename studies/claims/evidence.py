"""Evidence for claims: runs of studies by name and seed, and lines of result files."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flash_lm.runs.jsonl import Line


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of a run of a study.

    Attributes:
        scores: its result lines, by split and sequence length.
        trained_at: the sequence length of training.
    """

    scores: Mapping[tuple[str, int], Line]
    trained_at: int

    def line(self, split: str, length: int | None) -> Line | None:
        """Returns its score on a split at a sequence length (None: that of training); None: not scored."""
        return self.scores.get((split, length or self.trained_at))


class MissingError(Exception):
    """Raised when a claim's runs or files are missing; the message says which."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that was run and measured.

    Attributes:
        studies: runs by study, name and seed.
        files: the lines of result files, by path.
    """

    studies: Mapping[str, Mapping[str, Mapping[int, Run]]]
    files: Mapping[str, Sequence[Line]]

    def runs_of_common_seeds(self, study: str, *names: str) -> list[tuple[Run, ...]]:
        """Returns a tuple of runs of a study for each seed that all of them have.

        Raises:
            MissingError: a run is missing, or no seed is common to all.
        """
        runs = self.studies.get(study, {})
        if absent := [name for name in names if name not in runs]:
            raise MissingError(f"no finished run of {', '.join(absent)} in {study}")
        seeds = sorted(set.intersection(*(set(runs[name]) for name in names)))
        if not seeds:
            raise MissingError(f"no seed of all of {', '.join(names)} in {study}")
        return [tuple(runs[name][seed] for name in names) for seed in seeds]

    def value(self, path: str, key: str, wanted: Mapping[str, Any]) -> float:
        """Returns the largest value of a key among a file's lines that match `wanted`.

        Raises:
            MissingError: no line matches.
        """
        values = [line[key] for line in self.files.get(path, ()) if wanted.items() <= line.items() and key in line]
        if not values:
            raise MissingError(f"{path} has no {key} of {_format_keys(wanted)}")
        return max(values)


def _format_keys(wanted: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {x}" for key, x in wanted.items())
