"""Learning rates: each model is tuned with one seed, and its other seeds run at its best rate."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from flash_lm.runs.jsonl import Line
from flash_lm.runs.run_folder import run_hash
from flash_lm.sweeps.jobs import Job, ShouldStop


def rates_to_try(
    planned: Sequence[float], losses: Mapping[float, float], further: int, factor: float | None = None
) -> list[float]:
    """Returns the planned rates; while the best is the lowest or highest, up to `further` rates beyond it are added.

    Args:
        planned: one rate or more, in increasing order.
        losses: loss on the validation split by rate, for the rates tried so far.
        further: largest number of rates to add.
        factor: factor between the best rate and the next; None: the factor between the lowest two.

    >>> rates_to_try([0.001, 0.002], {0.001: 4.0, 0.002: 3.5}, further=1)
    [0.001, 0.002, 0.004]
    """
    rates = [*planned]
    for _ in range(further):
        ordered = sorted(rates)
        best = best_rate(rates, losses)
        if len(rates) < 2 or best is None or best not in (ordered[0], ordered[-1]):
            break
        step = factor or ordered[1] / ordered[0]
        rates.append(float(f"{best / step if best == ordered[0] else best * step:.2g}"))
    return rates


def best_rate(rates: Sequence[float], losses: Mapping[float, float]) -> float | None:
    """Returns the rate with the lowest loss, the first of equals; None: some rate has no loss yet."""
    return min(rates, key=lambda rate: losses[rate]) if losses.keys() >= {*rates} else None


def lines_at_best_rate(lines: Sequence[Line], about: Line, selection_loss: Callable[[Line], float]) -> list[Line]:
    """Returns a model's lines at the rate that was best with seed 0, failed runs included; empty if it has none.

    Args:
        lines: lines of a study.
        about: keys and values that identify the model's lines.
        selection_loss: see `rate_and_seed_jobs`.
    """
    model_lines = [line for line in lines if about.items() <= line.items()]
    best = min((line for line in model_lines if line["seed"] == 0), key=selection_loss, default={})
    return [line for line in model_lines if line["rate"] == best.get("rate")]


class Model(Protocol):
    """A model of a small study."""

    def about(self, rate: float, seed: int) -> dict[str, Any]:
        """Returns the keys that identify the line of a run."""
        ...

    def run_config(self, rate: float, seed: int) -> Any:
        """Returns the config of a run."""
        ...


M = TypeVar("M", bound=Model)


def rate_and_seed_jobs(
    models: Sequence[M],
    rates: Sequence[float],
    more_seeds: Sequence[int],
    further: int,
    lines: Sequence[Line],
    selection_loss: Callable[[Line], float],
    run_model: Callable[[M, float, int, pathlib.Path, ShouldStop], list[Line]],
    factor: float | None = None,
) -> list[Job]:
    """Lists the jobs known so far: each model at each rate with seed 0, then at its best rate with more seeds.

    Args:
        models: see `Model`.
        rates: learning rates to try.
        more_seeds: seeds besides 0.
        further: see `rates_to_try`.
        lines: lines of the finished jobs.
        selection_loss: returns a line's score on the validation split, less is better; also of a failed run.
        run_model: trains and scores a model with a rate and a seed in a folder; returns its lines.
        factor: see `rates_to_try`.
    """
    jobs: list[Job] = []
    for model in models:
        model_lines = [line for line in lines if model.about(line["rate"], 0).items() <= line.items()]
        losses = {line["rate"]: selection_loss(line) for line in model_lines}
        tried = rates_to_try(rates, losses, further, factor)
        best = best_rate(tried, losses)
        of_best = [(best, seed) for seed in more_seeds] if best is not None else []
        for rate, seed in [*((rate, 0) for rate in tried), *of_best]:
            about = model.about(rate, seed)
            name = "_".join(f"{x:g}" if isinstance(x, float) else str(x) for x in about.values()).replace("/", "_")
            study_hash = run_hash(model.run_config(rate, seed).to_dict())
            make = functools.partial(run_model, model, rate, seed)
            jobs.append(Job(name, about, study_hash, make))
    return jobs
