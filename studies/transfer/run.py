"""Runs of the transfer study: models that are pretrained on texts, or not, and then learn from few labels or many.

Each family is pretrained once per corpus. Then each arm's learning rate is tuned. Then the runs follow. A run is
written as lines when it is scored, and its weights are removed. Pretrained weights stay until all runs of the family
are done. If they are lost before, they are made again. Several processes may share a study, see
`flash_lm.sweeps.jobs`.
"""

import itertools
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from flash_lm.config.changes import Changes, apply_changes
from flash_lm.config.experiment import parse
from flash_lm.errors import NonfiniteError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import Line
from flash_lm.sweeps.grid import check_runs, train_to_end
from flash_lm.sweeps.jobs import PRETRAINING, RATES, Job, JobFolder, ShouldStop, make_jobs, study_hash
from flash_lm.sweeps.tuning import best_values, tune


class Arm(NamedTuple):
    """A way to train a classifier.

    Attributes:
        name: name of the arm.
        corpus: corpus of pretraining; None: no pretraining.
        changes: config keys of the arm.
    """

    name: str
    corpus: str | None
    changes: Changes


class Transfer(NamedTuple):
    """The study.

    Attributes:
        config: base config of all runs, for the task with all labels.
        families: families that are compared.
        arms: arms of each family.
        corpora: config keys of each corpus of pretraining, by name.
        pretraining: further config keys of pretraining.
        shares: shares of the labels.
        seeds: seeds of each arm and share.
        tuned_share: share of the labels in the rate search.
        tuning_steps: steps of the longest runs of the rate search.
        data: hash of all texts and the tokenizer.
    """

    config: ConfigDict
    families: Sequence[str]
    arms: Sequence[Arm]
    corpora: Mapping[str, Changes]
    pretraining: Changes
    shares: Sequence[float]
    seeds: Sequence[int]
    tuned_share: float
    tuning_steps: int
    data: str

    def pretraining_changes(self, family: str, corpus: str) -> Changes:
        """Returns the config keys of a family's pretraining; it reads no label."""
        base = {"model.family": family, "data.label_column": None}
        return {**base, **self.pretraining, **self.corpora[corpus]}

    def arm_config(self, family: str, arm: Arm, runs: pathlib.Path, share: float, seed: int = 0) -> Any:
        """Returns the config of an arm."""
        parent = {"train.init_from": str(_pretrained_folder(runs, family, arm.corpus))} if arm.corpus else {}
        base = {"model.family": family, "data.label_share": share, "seed": seed}
        return apply_changes(self.config, {**base, **parent, **arm.changes})


def run_transfer(study: Transfer, job_folder: JobFolder) -> list[str]:
    """Makes all missing jobs that no other process has begun.

    Args:
        study: the study.
        job_folder: its `out` gets pretraining, rates and runs; its `runs` also has the pretrained models.

    Returns:
        Names of jobs that are left: another process makes them, or they wait for its results.

    Raises:
        InputError: lines of another config, or bad data.
        Stopped: `should_stop` returned true.
    """
    for family in study.families:
        _check(study, family)
    left: list[str] = []
    for family in study.families:
        left_of_family = make_jobs(lambda family=family: _jobs(study, family, job_folder), job_folder)
        if not left_of_family:
            for corpus in study.corpora:
                shutil.rmtree(_pretrained_folder(job_folder.runs, family, corpus), ignore_errors=True)
        left += left_of_family
    return left


def _jobs(study: Transfer, family: str, job_folder: JobFolder) -> list[Job]:
    """Lists the jobs of one family: pretraining, the rate search of each arm, and the runs."""
    runs = job_folder.runs
    pretraining_jobs: dict[str, Job] = {}
    rates: dict[str, Job] = {}
    run_jobs: list[Job] = []
    # Pretraining, once per corpus.
    for corpus in study.corpora:
        config = apply_changes(study.config, study.pretraining_changes(family, corpus))
        name = _pretrained_folder(runs, family, corpus).name
        make = lambda folder, stop, config=config, corpus=corpus: _pretrain(config, family, corpus, runs, stop)
        about = {"family": family, "pretraining": corpus}
        pretraining_jobs[corpus] = Job(name, about, _hash(config, study.data, corpus), make, kind=PRETRAINING)
    parents = {corpus: job_folder.lines(job) for corpus, job in pretraining_jobs.items()}
    failures = {corpus: _failure(lines) for corpus, lines in parents.items()}
    # The rate search of each arm, after its pretraining.
    for arm in study.arms:
        parent = pretraining_jobs.get(arm.corpus or "")
        config = study.arm_config(family, arm, runs, study.tuned_share)
        job_hash = _hash(config, study.data, study.tuning_steps, parent and parent.study_hash)
        failure = failures.get(arm.corpus or "")
        make = lambda folder, stop, config=config, failure=failure: _tune(study, config, family, failure, folder, stop)
        ready = arm.corpus is None or bool(parents[arm.corpus])
        about = {"model": family, "arm": arm.name}
        rates[arm.name] = Job(_join_name(family, arm.name), about, job_hash, make, ready, RATES)
    searched = {name: job_folder.lines(job) for name, job in rates.items()}
    # The runs, at the best rate of their arm.
    for share, seed, arm in itertools.product(study.shares, study.seeds, study.arms):
        config, rate = study.arm_config(family, arm, runs, share, seed), rates[arm.name]
        tuned = searched[arm.name]
        about = {"family": family, "arm": arm.name, "share": share, "seed": seed}
        make = lambda folder, stop, config=config, tuned=tuned: _run(config, tuned, folder, stop)
        name = _join_name(family, arm.name, f"{share:g}", "seed", str(seed))
        run_jobs.append(Job(name, about, _hash(config, rate.study_hash), make, rate.is_ready and bool(tuned)))
    # Lost weights are made again if a missing job needs them, and the jobs that need them wait.
    missing = {job.about["arm"] for job in (*rates.values(), *run_jobs) if not job_folder.lines(job)}
    needed = {arm.corpus for arm in study.arms if arm.name in missing}
    for corpus, job in pretraining_jobs.items():
        is_done = bool(parents[corpus]) and not failures[corpus]
        is_gone = is_done and not _pretrained_folder(runs, family, corpus).exists()
        pretraining_jobs[corpus] = job._replace(is_lost=is_gone and corpus in needed)
    without = {arm.name for arm in study.arms if arm.corpus and pretraining_jobs[arm.corpus].is_lost}
    wait = lambda job: job._replace(is_ready=job.is_ready and job.about["arm"] not in without)  # for its weights
    rates, run_jobs = {name: wait(job) for name, job in rates.items()}, [wait(job) for job in run_jobs]
    return [*pretraining_jobs.values(), *rates.values(), *run_jobs]


def _check(study: Transfer, family: str) -> None:
    """Checks the configs that a family needs."""
    check_runs(
        study.config, {f"{family}, {corpus}": study.pretraining_changes(family, corpus) for corpus in study.corpora}
    )
    check_runs(study.config, {f"{family}, {arm.name}": {"model.family": family, **arm.changes} for arm in study.arms})


def _pretrain(config: Any, family: str, corpus: str, runs: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    folder = _pretrained_folder(runs, family, corpus)  # the job's folder is removed with its lines written
    try:
        train_to_end(config, folder, should_stop)
    except NonfiniteError:
        shutil.rmtree(folder)
        raise
    return evaluate(folder, "validation")


def _tune(
    study: Transfer, config: Any, family: str, failure: str | None, folder: pathlib.Path, should_stop: ShouldStop
) -> list[Line]:
    """Tunes the rate on the validation split, whose labelled texts no run trains on."""
    if failure:
        return [{"failed": f"pretraining: {failure}"}]
    budget = study.tuning_steps * parse(config).data.tokens_per_batch
    warmup = {"train.warmup_steps": None}  # proportional to the steps of each run
    return tune(config, {family: warmup}, "train.learning_rate", budget, folder, should_stop)


def _run(config: Any, tuned: list[Line], folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    if failure := _failure(tuned):
        return [{"failed": failure}]
    (best,) = best_values(tuned)
    at = {"rate": best["value"]}
    if "failed" in best:
        return [at | {"failed": f"no learning rate stays finite: {best['failed']}"}]
    try:
        train_to_end(apply_changes(config, {"train.learning_rate": best["value"]}), folder, should_stop)
        return [score | at for score in evaluate(folder, "test")]
    except NonfiniteError as error:
        return [at | {"failed": str(error)}]


def _failure(lines: list[Line]) -> str | None:
    """Returns why a job has no result; None: it has one."""
    return lines[0].get("failed") if len(lines) == 1 else None


def _pretrained_folder(runs: pathlib.Path, family: str, corpus: str) -> pathlib.Path:
    return runs / f"{family}_{corpus}"


def _hash(config: Any, *more: Any) -> str:
    """Returns the hash of a config and of other values that a job depends on; paths do not count."""
    no_paths = {"train.init_from": None, "data.tokenizer_path": None}
    return study_hash(apply_changes(config, no_paths), *more)


def _join_name(*parts: str) -> str:
    return "_".join(parts).replace(" ", "_").replace("-", "_")
