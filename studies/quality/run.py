"""A study of perplexity at several budgets, whose runs are scored and written as lines at once.

A run is a trunk at a constant rate, and a decay that branches off it for each budget (Hägele et al. 2024,
arXiv:2405.18392). What will be reported of it is scored when it ends, and then its weights are removed, so no later
step needs them. Several processes may work at one study: each takes what no other has begun.
"""

import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from flash_lm.config.experiment import parse
from flash_lm.data.slices import ALL
from flash_lm.errors import InputError, NonfiniteError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import Line, read_jsonl, write_jsonl
from flash_lm.runs.provenance import config_hash
from flash_lm.runs.run_folder import run_hash
from flash_lm.sweeps.grid import Changes, Runs, changed, check_runs, train_whole
from flash_lm.sweeps.tuning import best_values, tune
from studies.protocol.jobs import begun_here, is_made, write_made

DECAY = 5  # the last fifth of each budget decays
STABLE = "stable"
POSITIONS = "positions"  # slices that are scored in rows of every length
BLOCKS = 50  # at most, of consecutive rows of the test split
_OF_A_CURVE = ("split", "step", "loss", "accuracy", "grad_norm", "learning_rate", "skipped_steps", "loss_spikes")
ShouldStop = Callable[[], bool]


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
        return {model: {**own, **self.changes, "train.steps": self.steps} for model, own in self.models.items()}


class Trunk(NamedTuple):
    """One model and seed of a part."""

    part: Part
    model: str
    seed: int
    config: Any

    @property
    def at(self) -> dict[str, Any]:
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


class Workplace(NamedTuple):
    """Where a process works at a study.

    Attributes:
        data: identifies all texts, see `hash_of_files`.
        out: folder of the study's lines.
        runs: folder for runs in progress; several processes may share it.
        should_stop: called after every step; when it returns true, work stops where it is.
    """

    data: str
    out: pathlib.Path
    runs: pathlib.Path
    should_stop: ShouldStop


def study_hash(config: Any, *more: Any) -> str:
    """A hash of twelve digits of what a run's lines follow from: its config, and more that JSON can hold."""
    return config_hash([run_hash(config.to_dict()), *more])


def trunks_of(config: ConfigDict, parts: Sequence[Part]) -> list[Trunk]:
    """The trunks of a study in the order of its parts.

    Raises:
        InputError: a config is wrong.
    """
    found = []
    for part in parts:
        check_runs(config, part.runs)
        found += [
            Trunk(part, model, seed, changed(config, {**own, "seed": seed}))
            for seed in part.seeds
            for model, own in part.runs.items()
        ]
    return found


def parts_named(names: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    """The parts of these names, in the order of the parts.

    Raises:
        InputError: there is no part of a name.
    """
    known = dict.fromkeys(part.name for part in parts)
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no part {', '.join(unknown)}: must be among {', '.join(known)}")
    return [part for part in parts if part.name in names]


def make_parts(config: ConfigDict, parts: Sequence[Part], models: Runs, steps: int, place: Workplace) -> list[Trunk]:
    """Makes the parts of a study in their order, each after the rates of its models.

    Args:
        config: what all models start from.
        parts: of the study.
        models: what differs in each model that is tuned, by name.
        steps: of the longest runs of tuning.
        place: where `tune_models` and `run_trunks` work.

    Returns:
        Trunks that other processes have begun, or whose rate they are finding.

    Raises:
        InputError: a config is wrong, the lines are of another config, or bad data.
        Stopped: it was asked to stop.
    """
    left = []
    for trunks in [trunks_of(config, [part]) for part in parts]:  # all are checked before the first run
        tune_models(config, {trunk.tuned_as: models[trunk.tuned_as] for trunk in trunks}, steps, place)
        left += run_trunks(trunks, place)
    return left


def tune_models(config: ConfigDict, models: Runs, steps: int, place: Workplace) -> None:
    """Finds the learning rate of each model that has none in OUT/rates, on the validation split.

    Args:
        config: what all models start from.
        models: what differs in each.
        steps: of the longest runs.
        place: its `out` gets rates/MODEL.jsonl, with a line for each run.

    Raises:
        InputError: bad config or data, or the rates there are of another config.
        Stopped: it was asked to stop.
    """
    schedule = {"train.schedule": "sqrt", "train.decay_steps": steps // DECAY, "train.warmup_steps": None}
    of_longest: Any = changed(config, schedule)
    budget = steps * parse(config).data.tokens_per_batch
    for model, changes in models.items():
        file = place.out / "rates" / f"{model}.jsonl"
        folder = place.runs / f"tuning_{model}_{place.data}"  # its finished runs do not know their texts
        known = study_hash(changed(of_longest, changes), place.data, budget)
        with begun_here(place.runs / f"tuning_{model}.lock") as free:
            if is_made(file, known) or not free:
                continue
            print(f"rate of {model}", flush=True)
            lines = tune(of_longest, {model: changes}, "train.learning_rate", budget, folder, place.should_stop)
            write_made(file, lines, known)
            shutil.rmtree(folder)


def rates(out: pathlib.Path) -> dict[str, Line]:
    """The best line of each model's search, see `best_values`, by model."""
    found = {}
    for file in sorted((out / "rates").glob("*.jsonl")):
        (best,) = best_values(read_jsonl(file))
        found[best["model"]] = best
    return found


def run_trunks(trunks: Sequence[Trunk], place: Workplace) -> list[Trunk]:
    """Trains and scores each trunk that has no file in OUT/runs, unless another process is at it.

    A file is written whole, after all that it has, so a process may be killed at any time. A trunk whose loss becomes
    non-finite, or whose model has no finite rate, has one line, which says so.

    Args:
        trunks: what is to be made.
        place: its `out` has rates/, and gets runs/ with a file of lines for each trunk, and curves/ with how its loss
            fell.

    Returns:
        Trunks without a file: another process has begun them, or is finding their rate.

    Raises:
        InputError: the lines are of another config, or bad data.
        Stopped: it was asked to stop.
    """
    left = []
    for trunk in trunks:
        file, folder = place.out / "runs" / f"{trunk.name}.jsonl", place.runs / trunk.name
        best = rates(place.out).get(trunk.tuned_as)
        if best is None:
            left += [] if file.exists() else [trunk]
            continue
        scored = [[*of] for of in (trunk.part.shares, trunk.part.lengths, trunk.part.slices)]
        known = study_hash(trunk.config, place.data, scored, best["value"])
        with begun_here(place.runs / f"{trunk.name}.lock") as free:
            if is_made(file, known):
                continue
            if not free:
                left.append(trunk)
                continue
            print(trunk.name, flush=True)
            lines = _lines(trunk, best, folder, place.should_stop)
            file_of_curves = place.out / "curves" / file.name
            file_of_curves.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(file_of_curves, curves(folder))
            write_made(file, lines, known)
            shutil.rmtree(folder, ignore_errors=True)
    return left


def _lines(trunk: Trunk, best: Line, folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    """What is reported of a trunk, or why there is nothing."""
    about = {**trunk.at, "rate": best["value"]}
    if "failed" in best:
        return [{**about, "failed": f"no learning rate stays finite: {best['failed']}"}]
    try:
        return one_trunk(trunk, best["value"], folder, should_stop)
    except NonfiniteError as error:
        return [{**about, "failed": str(error)}]


def one_trunk(trunk: Trunk, rate: float, folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    """Trains and scores a trunk and its decays; returns a line for each score, with `share`: of the whole budget.

    Each budget is scored on the validation and the test split; the whole one also in rows of other lengths and by
    slices. Scores of the test split have blocks, from which `studies.protocol.hypotheses` knows the error of the text.

    Raises:
        NonfiniteError: the loss became non-finite.
        Stopped: it was asked to stop; the runs can go on.
    """
    lines, data = [], parse(trunk.config).data
    further = [length for length in trunk.part.lengths if length <= trunk.config.model.max_length]
    for name, changes in schedules(trunk, rate, folder).items():
        train_whole(changed(trunk.config, changes), folder / name, should_stop)
        if name == STABLE:
            continue
        whole = float(name) == 1
        lengths = [data.length, *(further if whole else ())]
        scores = evaluate(folder / name, "validation")
        for length in lengths:
            asked = [x for x in trunk.part.slices if whole and (x == POSITIONS or length == data.length)]
            scores += evaluate(folder / name, "test", [length], slices=[ALL, *asked], blocks=BLOCKS)
        lines += [score | trunk.at | {"share": float(name), "rate": rate} for score in scores]
    return lines


def curves(folder: pathlib.Path) -> list[Line]:
    """How the loss of each run in a folder fell, as far as it came: what explains a score when the run is gone."""
    kept = lambda line: {key: line[key] for key in _OF_A_CURVE if key in line}
    return [
        {"schedule": file.parent.relative_to(folder).as_posix(), **kept(line)}
        for file in sorted(folder.rglob("metrics.jsonl"))
        for line in read_jsonl(file)
    ]


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
