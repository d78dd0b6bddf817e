"""Trains and scores models at several budgets: one trunk per model and seed, and a decay for each budget.

The trunk has a constant rate, and each decay branches off it (Hägele et al. 2024, arXiv:2405.18392). All reported
scores are computed when a run ends. Then its weights are removed. Several processes may share a study: each takes jobs
that no other process has begun.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from flash_lm.config.changes import Changes, Runs, apply_changes
from flash_lm.config.experiment import parse
from flash_lm.data.slices import ALL
from flash_lm.errors import InputError, NonfiniteError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import Line, group_lines
from flash_lm.sweeps.grid import check_runs, train_to_end
from flash_lm.sweeps.jobs import RATES, Job, ShouldStop, read_job_lines, study_hash
from flash_lm.sweeps.tuning import best_values, tune

DECAY = 5  # the last fifth of each budget decays
STABLE = "stable"
POSITIONS = "positions"  # slices that are scored at every sequence length
BLOCKS = 50  # most blocks of consecutive sequences of the test split


class Part(NamedTuple):
    """A part of the study: models with the same seeds, tokens and scores.

    Attributes:
        name: name of the part; parts that differ only in models and seeds may share it.
        models: config keys of each model, by name; a model has the learning rate of the name before its first slash.
        changes: config keys of all models of the part.
        seeds: seeds of each model.
        steps: steps of the full budget.
        shares: shares of the full budget that get a decay; the last is 1.
        lengths: further sequence lengths that are scored at the full budget; a model with fewer positions skips them.
        slices: keys of `SLICES`, scored at the full budget.
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
        """All config keys of each model."""
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
        """The keys that identify its lines."""
        return {"part": self.part.name, "run": self.model, "seed": self.seed}

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.part.name}_{self.model}_seed_{self.seed}".replace("/", "_")

    @property
    def tuned_as(self) -> str:
        """Name of the model whose learning rate it uses."""
        return self.model.partition("/")[0]


def list_trunks(config: ConfigDict, parts: Sequence[Part]) -> list[Trunk]:
    """Lists the trunks of a study in the order of its parts.

    Raises:
        InputError: a config is wrong.
    """
    trunks = []
    for part in parts:
        check_runs(config, part.runs)
        trunks += [
            Trunk(part, model, seed, apply_changes(config, {**model_changes, "seed": seed}))
            for seed in part.seeds
            for model, model_changes in part.runs.items()
        ]
    return trunks


def select_parts(names: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    """Returns the parts with these names, in the order of `parts`.

    Raises:
        InputError: unknown name.
    """
    known = dict.fromkeys(part.name for part in parts)
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no part {', '.join(unknown)}: must be among {', '.join(known)}")
    return [part for part in parts if part.name in names]


def list_jobs(
    config: ConfigDict, parts: Sequence[Part], models: Runs, steps: int, texts: str, out: pathlib.Path
) -> list[Job]:
    """Lists the jobs of parts of the study in order: the rate search of each model, then the runs at its rate.

    Args:
        config: base config of all models.
        parts: parts of the study.
        models: config keys of each tuned model, by name.
        steps: steps of the longest runs of a search.
        texts: hash of all texts, see `hash_of_files`.
        out: folder of the lines, with the rates known so far.

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
    """Returns the job that searches a model's learning rate on the validation split.

    Args:
        config: base config of all models.
        model: name of the model.
        changes: config keys of the model.
        steps: steps of the longest runs.
        texts: hash of all texts.
    """
    schedule = {"train.schedule": "sqrt", "train.decay_steps": steps // DECAY, "train.warmup_steps": None}
    of_longest: Any = apply_changes(config, schedule)
    budget = steps * parse(config).data.tokens_per_batch
    job_hash = study_hash(apply_changes(of_longest, changes), texts, budget)

    def make(folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
        return tune(of_longest, {model: changes}, "train.learning_rate", budget, folder, should_stop)

    return Job(model, {"model": model}, job_hash, make, kind=RATES)


def read_best_rates(out: pathlib.Path) -> dict[str, Line]:
    """Reads the best line of each model's rate search, by model; see `best_values`."""
    best = {}
    for (model,), model_lines in group_lines(read_job_lines(out, RATES), "model").items():
        (best[model],) = best_values(model_lines)
    return best


def trunk_job(trunk: Trunk, best: Line | None, texts: str) -> Job:
    """Returns the job of a trunk at the best rate of its model.

    If its loss becomes non-finite, or no rate stays finite, its line says so.

    Args:
        trunk: the trunk to train and score.
        best: its line of `read_best_rates`; None: not known yet.
        texts: hash of all texts.
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
    """Trains and scores a trunk and its decays, as `score_decays`; returns all lines."""
    return [line for lines in score_decays(trunk, rate, folder, should_stop) for line in lines]


def score_decays(trunk: Trunk, rate: float, folder: pathlib.Path, should_stop: ShouldStop) -> Iterator[list[Line]]:
    """Trains a trunk and its decays, and yields the lines of each budget: one per score, with `share`, its share.

    Each budget is scored on the validation and the test split. The full budget is also scored at other sequence lengths
    and by slices. Scores of the test split have blocks, from which `studies.protocol.hypotheses` estimates the error of
    the text.

    Raises:
        NonfiniteError: the loss became non-finite.
        Stopped: `should_stop` returned true; the runs can be resumed.
    """
    data = parse(trunk.config).data
    longer = [length for length in trunk.part.lengths if length <= trunk.config.model.max_length]
    for name, changes in schedules(trunk, rate, folder).items():
        train_to_end(apply_changes(trunk.config, changes), folder / name, should_stop)
        if name == STABLE:
            continue
        is_full = float(name) == 1
        lengths = [data.length, *(longer if is_full else ())]
        scores = evaluate(folder / name, "validation")
        for length in lengths:
            slices = [x for x in trunk.part.slices if is_full and (x == POSITIONS or length == data.length)]
            scores += evaluate(folder / name, "test", [length], slices=[ALL, *slices], blocks=BLOCKS)
        yield [score | trunk.about | {"share": float(name), "rate": rate} for score in scores]


def schedules(trunk: Trunk, rate: float, folder: pathlib.Path) -> Runs:
    """Returns the config keys of a trunk's runs, in order: the stable run, if it has several budgets, and each decay.

    A decay equals a run of its budget from step 0, to the bit.
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
    every = {"train.checkpoint_every": shortest, "train.keep": longest}  # keeps all, also those saved at a stop
    stable = {"train.learning_rate": rate, "train.steps": longest, "train.schedule": "constant"}
    branch = lambda share: {"train.branch_from": f"{folder / STABLE}@{starts[share]}"}
    return {STABLE: stable | every} | {f"{share:g}": sqrt(share) | branch(share) for share in steps}
