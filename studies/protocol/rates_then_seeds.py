"""The protocol of a small study: each model at several rates with one seed, and more seeds at its best rate."""

import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from flash_lm.errors import InputError, NonfiniteError
from flash_lm.runs.jsonl import Line, append_jsonl, read_lines
from flash_lm.runs.run_folder import run_hash


class Rated(Protocol):
    """A model of a study."""

    def at(self, rate: float, seed: int) -> dict[str, Any]:
        """What identifies a run in the file of runs."""
        ...

    def of_run(self, rate: float, seed: int) -> Any:
        """The config of a run."""
        ...


Model = TypeVar("Model", bound=Rated)


def rates_then_seeds(
    models: Sequence[Model],
    rates: Sequence[float],
    more_seeds: Sequence[int],
    file: pathlib.Path,
    runs: pathlib.Path,
    one_run: Callable[[Model, float, int, pathlib.Path], Line],
    best: Callable[[list[Line]], Line],
    beyond: int = 0,
) -> list[Line]:
    """Each model at each rate with seed 0, and at its best rate with more seeds.

    Args:
        models: the models.
        rates: learning rates.
        more_seeds: seeds besides 0.
        file: gets a line for each run as soon as it is scored; what has a line there is not made again.
        runs: folder for runs in progress; a run's own folder is removed when its line is written.
        one_run: makes the run of a model, a rate and a seed in a folder; returns its line, with config_hash.
        best: of the lines of a model with seed 0, failed ones included, the one whose rate gets more seeds.
        beyond: at most so many further rates of each model, while its best is its lowest or highest one.

    Returns:
        All lines of the file.

    Raises:
        InputError: the file has runs of another config.
        Stopped: a run was asked to stop.
    """
    lines = read_lines(file)

    def add(model: Model, rate: float, seed: int) -> Line:
        at, known = model.at(rate, seed), run_hash(model.of_run(rate, seed).to_dict())
        for line in lines:
            if at.items() <= line.items():
                if line["config_hash"] != known:
                    raise InputError(f"{file} has a run of {at['model']} with another config: write to another folder")
                return line
        print(", ".join(f"{key} {value}" for key, value in at.items()), flush=True)
        folder = runs / "_".join(f"{x:g}" if isinstance(x, float) else str(x) for x in at.values())
        try:
            line = one_run(model, rate, seed, folder)
        except NonfiniteError as error:
            line = at | {"failed": str(error), "config_hash": known}
        append_jsonl(file, [line])
        lines.append(line)
        shutil.rmtree(folder, ignore_errors=True)
        return line

    for model in models:
        first = [add(model, rate, 0) for rate in rates]
        for _ in range(beyond):
            further = next_rate([line["rate"] for line in first], best(first)["rate"])
            if further is None:
                break
            first.append(add(model, further, 0))
        for seed in more_seeds:
            add(model, best(first)["rate"], seed)
    return lines


def next_rate(tried: Sequence[float], best: float) -> float | None:
    """The rate to try below or above those tried, by a factor of 3; None: the best is neither lowest nor highest."""
    factors = {min(tried): 1 / 3, max(tried): 3.0}
    return float(f"{best * factors[best]:.2g}") if best in factors else None
