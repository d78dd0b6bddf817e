"""A study of perplexity at several budgets, whose runs are scored and written as lines at once.

A run is a trunk at a constant rate, and a decay that branches off it for each budget (Hägele et al. 2024,
arXiv:2405.18392). What will be reported of it is scored when it ends, and then its weights are removed, so no later
step needs them. Several processes may work at one study: each takes what no other has begun.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from flash_lm.config.experiment import parse
from flash_lm.data.slices import ALL
from flash_lm.errors import InputError, NonfiniteError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import Line, grouped
from flash_lm.sweeps.grid import Changes, Runs, changed, check_runs, train_whole
from flash_lm.sweeps.tuning import best_values, tune
from studies.protocol.jobs import RATES, Job, ShouldStop, read_job_lines, study_hash

DECAY = 5  # the last fifth of each budget decays
STABLE = "stable"
POSITIONS = "positions"  # slices that are scored in rows of every length
BLOCKS = 50  # at most, of consecutive rows of the test split


class Part(NamedTuple):
    """A part of the study: models, each with the same seeds, tokens and scores.

    Attributes:
        name: of the part; two that differ only in models and seeds may share it.
        models: what differs in each, by name; a model has the learning rate of the name before its first slash.
        changes: what differs in all of them.
        seeds: of all of them.
        steps: of the whole budget.
        shares: of the whole budget that have a decay each; 1 is the last.
        lengths: of rows that are scored at the whole budget, besides those of training; a model without so many
            positions leaves them out.
        slices: keys of `SLICES`, scored at the whole budget.
    """

    name: str
    models: Runs
    changes: Changes
    seeds: Sequence[int]
    steps: int
    shares: Sequence[float] = (1.0,)
    lengths: Sequence[int] = ()
    slices: Sequence[str] = ()

    @property
    def runs(self) -> Runs:
        """All that differs in each model."""
        return {
            model: {**model_changes, **self.changes, "train.steps": self.steps}
            for model, model_changes in self.models.items()
        }


class Trunk(NamedTuple):
    """One model and seed of a part."""

    part: Part
    model: str
    seed: int
    config: Any

    @property
    def about(self) -> dict[str, Any]:
        """What identifies its lines."""
        return {"part": self.part.name, "run": self.model, "seed": self.seed}

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.part.name}_{self.model}_seed_{self.seed}".replace("/", "_")

    @property
    def tuned_as(self) -> str:
        """The model whose learning rate it has."""
        return self.model.partition("/")[0]


def list_trunks(config: ConfigDict, parts: Sequence[Part]) -> list[Trunk]:
    """The trunks of a study in the order of its parts.

    Raises:
        InputError: a config is wrong.
    """
    trunks = []
    for part in parts:
        check_runs(config, part.runs)
        trunks += [
            Trunk(part, model, seed, changed(config, {**model_changes, "seed": seed}))
            for seed in part.seeds
            for model, model_changes in part.runs.items()
        ]
    return trunks


def select_parts(names: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    """The parts of these names, in the order of the parts.

    Raises:
        InputError: there is no part of a name.
    """
    known = dict.fromkeys(part.name for part in parts)
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no part {', '.join(unknown)}: must be among {', '.join(known)}")
    return [part for part in parts if part.name in names]


def list_jobs(
    config: ConfigDict, parts: Sequence[Part], models: Runs, steps: int, texts: str, out: pathlib.Path
) -> list[Job]:
    """The jobs of parts of the study in their order: the search of each model's rate, then the runs that have it.

    Args:
        config: what all models start from.
        parts: of the study.
        models: what differs in each model that is tuned, by name.
        steps: of the longest runs of a search.
        texts: identifies all texts, see `hash_of_files`.
        out: folder of the lines, which has the rates that are known.

    Raises:
        InputError: a config is wrong.
    """
    best, jobs, searched = read_best_rates(out), [], set()
    for trunk in list_trunks(config, parts):
        name = trunk.tuned_as
        if name not in searched:
            jobs.append(rate_job(config, name, models[name], steps, texts))
            searched.add(name)
        jobs.append(trunk_job(trunk, best.get(name), texts))
    return jobs


def rate_job(config: ConfigDict, model: str, changes: Changes, steps: int, texts: str) -> Job:
    """The search of a model's learning rate, on the validation split.

    Args:
        config: what all models start from.
        model: its name.
        changes: what differs in it.
        steps: of the longest runs.
        texts: identifies all texts.
    """
    schedule = {"train.schedule": "sqrt", "train.decay_steps": steps // DECAY, "train.warmup_steps": None}
    of_longest: Any = changed(config, schedule)
    budget = steps * parse(config).data.tokens_per_batch
    job_hash = study_hash(changed(of_longest, changes), texts, budget)

    def make(folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
        return tune(of_longest, {model: changes}, "train.learning_rate", budget, folder, should_stop)

    return Job(model, {"model": model}, job_hash, make, kind=RATES)


def read_best_rates(out: pathlib.Path) -> dict[str, Line]:
    """The best line of each model's search, see `best_values`, by model."""
    best = {}
    for (model,), model_lines in grouped(read_job_lines(out, RATES), "model").items():
        (best[model],) = best_values(model_lines)
    return best


def trunk_job(trunk: Trunk, best: Line | None, texts: str) -> Job:
    """A run at the best rate of its model; one whose loss becomes non-finite, or that has no finite rate, says so.

    Args:
        trunk: what is trained and scored.
        best: a line of `rates`; None: it is not known yet.
        texts: identifies all texts.
    """
    if best is None:
        return Job(trunk.name, trunk.about, "", lambda *_: [], is_ready=False)
    scored = [[*of] for of in (trunk.part.shares, trunk.part.lengths, trunk.part.slices)]
    rate = best["value"]

    def make(folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
        if "failed" in best:
            return [{"rate": rate, "failed": f"no learning rate stays finite: {best['failed']}"}]
        try:
            return run_trunk(trunk, rate, folder, should_stop)
        except NonfiniteError as error:
            return [{"rate": rate, "failed": str(error)}]

    return Job(trunk.name, trunk.about, study_hash(trunk.config, texts, scored, rate), make)


def run_trunk(trunk: Trunk, rate: float, folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    """Trains and scores a trunk and its decays; returns a line for each score, with `share`: of the whole budget.

    Each budget is scored on the validation and the test split; the whole one also in rows of other lengths and by
    slices. Scores of the test split have blocks, from which `studies.protocol.hypotheses` knows the error of the text.

    Raises:
        NonfiniteError: the loss became non-finite.
        Stopped: it was asked to stop; the runs can go on.
    """
    lines, data = [], parse(trunk.config).data
    longer = [length for length in trunk.part.lengths if length <= trunk.config.model.max_length]
    for name, changes in schedules(trunk, rate, folder).items():
        train_whole(changed(trunk.config, changes), folder / name, should_stop)
        if name == STABLE:
            continue
        is_full = float(name) == 1
        lengths = [data.length, *(longer if is_full else ())]
        scores = evaluate(folder / name, "validation")
        for length in lengths:
            slices = [x for x in trunk.part.slices if is_full and (x == POSITIONS or length == data.length)]
            scores += evaluate(folder / name, "test", [length], slices=[ALL, *slices], blocks=BLOCKS)
        lines += [score | trunk.about | {"share": float(name), "rate": rate} for score in scores]
    return lines


def schedules(trunk: Trunk, rate: float, folder: pathlib.Path) -> Runs:
    """The runs of a trunk by name, in their order: the stable one, if there are several budgets, and each decay.

    A decay is the run of its budget from the beginning, to the bit.
    """
    steps = {share: round(share * trunk.config.train.steps) for share in trunk.part.shares}
    decays = {share: count // DECAY for share, count in steps.items()}
    sqrt = lambda share: {
        "train.learning_rate": rate,
        "train.steps": steps[share],
        "train.schedule": "sqrt",
        "train.decay_steps": decays[share],
    }
    if len(steps) == 1:
        return {f"{share:g}": sqrt(share) for share in steps}
    starts = {share: steps[share] - decays[share] for share in steps}
    shortest, longest = min(starts.values()), max(starts.values())
    if odd := [start for start in starts.values() if start % shortest]:
        raise InputError(f"decays begin at steps {odd}, which are no multiples of {shortest}: change steps or shares")
    every = {"train.checkpoint_every": shortest, "train.keep": longest}  # all: those of a stop come on top
    stable = {"train.learning_rate": rate, "train.steps": longest, "train.schedule": "constant"}
    branch = lambda share: {"train.branch_from": f"{folder / STABLE}@{starts[share]}"}
    return {STABLE: stable | every} | {f"{share:g}": sqrt(share) | branch(share) for share in steps}
