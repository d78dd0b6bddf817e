"""Learning rates: each model has the best of its own, found with one seed, and the other seeds run at that."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from flash_lm.runs.jsonl import Line
from flash_lm.runs.run_folder import run_hash
from studies.protocol.jobs import Job, ShouldStop


def rates_to_try(
    planned: Sequence[float], losses: Mapping[float, float], further: int, factor: float | None = None
) -> list[float]:
    """The rates that are planned, and while the best is the lowest or the highest, up to `further` beyond it.

    Args:
        planned: one rate or more, by growing value.
        losses: of the rates that have been tried, on the validation split.
        further: at most so many more.
        factor: between the best and the next; None: that between the lowest two.
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
    """The rate with the lowest loss, the first of equals; None: not all are tried."""
    return min(rates, key=lambda rate: losses[rate]) if losses.keys() >= {*rates} else None


def at_best_rate(lines: Sequence[Line], about: Line, loss_of: Callable[[Line], float]) -> list[Line]:
    """A model's lines, of failed runs, too, at the rate that was best with seed 0; empty if it has none.

    Args:
        lines: of a study.
        about: what identifies the model's.
        loss_of: see `rated_jobs`.
    """
    own = [line for line in lines if about.items() <= line.items()]
    best = min((line for line in own if line["seed"] == 0), key=loss_of, default={})
    return [line for line in own if line["rate"] == best.get("rate")]


class Model(Protocol):
    """A model of a small study."""

    def at(self, rate: float, seed: int) -> dict[str, Any]:
        """What identifies the line of a run."""
        ...

    def of_run(self, rate: float, seed: int) -> Any:
        """The config of a run."""
        ...


M = TypeVar("M", bound=Model)


def rated_jobs(
    models: Sequence[M],
    rates: Sequence[float],
    more_seeds: Sequence[int],
    further: int,
    lines: Sequence[Line],
    loss_of: Callable[[Line], float],
    one_run: Callable[[M, float, int, pathlib.Path, ShouldStop], list[Line]],
    factor: float | None = None,
) -> list[Job]:
    """The jobs that are known so far: each model at each rate with seed 0, and at its best rate with more seeds.

    Args:
        models: see `Model`.
        rates: learning rates.
        more_seeds: seeds besides 0.
        further: see `rates_to_try`.
        lines: of the jobs that are made.
        loss_of: a line's score on the validation split, less is better; of a failed run, too.
        one_run: makes the run of a model, a rate and a seed in a folder; returns its lines.
        factor: see `rates_to_try`.
    """
    found: list[Job] = []
    for model in models:
        own = [line for line in lines if model.at(line["rate"], 0).items() <= line.items()]
        losses = {line["rate"]: loss_of(line) for line in own}
        tried = rates_to_try(rates, losses, further, factor)
        best = best_rate(tried, losses)
        of_best = [(best, seed) for seed in more_seeds] if best is not None else []
        for rate, seed in [*((rate, 0) for rate in tried), *of_best]:
            about = model.at(rate, seed)
            name = "_".join(f"{x:g}" if isinstance(x, float) else str(x) for x in about.values()).replace("/", "_")
            known = run_hash(model.of_run(rate, seed).to_dict())
            make = functools.partial(one_run, model, rate, seed)
            found.append(Job(name, about, known, make))
    return found
