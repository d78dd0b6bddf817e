"""A study of transfer: models that are pretrained on texts, or not, and then learn labels from few texts or many.

Pretraining is done once for each family and corpus; then each arm's learning rate is found; then come the runs. A run
is written as lines when it is scored, and its weights are removed. Those of pretraining stay until all runs of the
family are made; if they are lost before, they are made again. Several processes may work at one study, see
`studies.protocol.jobs`.
"""

import itertools
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from flash_lm.config.experiment import parse
from flash_lm.errors import NonfiniteError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import Line, read_jsonl
from flash_lm.runs.provenance import config_hash
from flash_lm.runs.run_folder import run_hash
from flash_lm.sweeps.grid import Changes, changed, check_runs, train_whole
from flash_lm.sweeps.tuning import best_values, tune
from studies.protocol.jobs import begun_here, is_made, write_made

ShouldStop = Callable[[], bool]


class Arm(NamedTuple):
    """A way to a classifier.

    Attributes:
        name: of the arm.
        corpus: that the model is pretrained on; None: none.
        changes: what differs in its config.
    """

    name: str
    corpus: str | None
    changes: Changes


class Transfer(NamedTuple):
    """The whole study.

    Attributes:
        config: what all runs start from: of the task, with all labels.
        families: that are compared.
        arms: of each family.
        corpora: what differs in the data of pretraining, by name.
        pretraining: what else differs in pretraining.
        shares: of the labels.
        seeds: of each arm and share.
        tuned_share: of the labels, with which rates are found.
        tuning_steps: of the longest runs of the search.
        data: identifies all texts and the tokenizer.
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

    def pretrained(self, family: str, corpus: str) -> Changes:
        """What differs in a family's pretraining; it reads no label."""
        own = {"model.family": family, "data.label_column": None}
        return {**own, **self.pretraining, **self.corpora[corpus]}

    def of(self, family: str, arm: Arm, runs: pathlib.Path, share: float, seed: int = 0) -> Any:
        """The config of an arm."""
        parent = {"train.init_from": str(_parent(runs, family, arm.corpus))} if arm.corpus else {}
        own = {"model.family": family, "data.label_share": share, "seed": seed}
        return changed(self.config, {**own, **parent, **arm.changes})


class Task(NamedTuple):
    """A piece of work.

    Attributes:
        name: of its files.
        file: of its lines.
        known: what identifies its config.
        needs: files of other tasks.
        make: makes its lines.
        weights: folder of a pretrained model, which it also makes; None: it makes none.
    """

    name: str
    file: pathlib.Path
    known: str
    needs: Sequence[pathlib.Path]
    make: Callable[[], list[Line]]
    weights: pathlib.Path | None = None

    @property
    def is_missing(self) -> bool:
        """Whether its lines are not there."""
        return not is_made(self.file, self.known)

    def is_due(self, tasks: Sequence["Task"]) -> bool:
        """Whether there is something to do: its lines are missing, or weights that one of the tasks still needs."""
        if self.weights is None or self.is_missing:
            return self.is_missing
        needed = any(self.file in task.needs and task.is_missing for task in tasks)
        return needed and not self.weights.exists() and _failure(self.file) is None


def run_transfer(study: Transfer, out: pathlib.Path, runs: pathlib.Path, should_stop: ShouldStop) -> list[str]:
    """Makes all that is missing, unless another process is at it.

    Args:
        study: what is to be made.
        out: gets pretraining/, rates/ and runs/ with a file of lines for each task.
        runs: folder for runs in progress and for the pretrained models.
        should_stop: called after every step; when it returns true, work stops where it is.

    Returns:
        Names of tasks that are left: another process has begun them, or they need what it is making.

    Raises:
        InputError: the lines are of another config, or bad data.
        Stopped: it was asked to stop.
    """
    left: list[str] = []
    for family in study.families:
        _check(study, family)
    for family in study.families:
        tasks = _tasks(study, family, out, runs, should_stop)
        left += _work_off(tasks, runs)
        if not any(task.is_missing for task in tasks):
            for corpus in study.corpora:
                shutil.rmtree(_parent(runs, family, corpus), ignore_errors=True)
    return left


def _work_off(tasks: Sequence[Task], runs: pathlib.Path) -> list[str]:
    """Makes tasks in their order as long as one can be made."""
    while True:
        left, made = [], False
        for task in tasks:
            with begun_here(runs / f"{task.name}.lock") as free:
                if not task.is_due(tasks):
                    continue
                if not free or not all(file.exists() for file in task.needs):
                    left.append(task.name)
                    continue
                print(task.name, flush=True)
                task.file.unlink(missing_ok=True)  # weights are lost: nothing may use them before they are whole again
                write_made(task.file, task.make(), task.known)
                if task.weights is None:  # its lines have all that is reported
                    shutil.rmtree(runs / task.name, ignore_errors=True)
                made = True
        if not made:
            return left


def _tasks(study: Transfer, family: str, out: pathlib.Path, runs: pathlib.Path, should_stop: ShouldStop) -> list[Task]:
    """Of one family: pretraining, the rate of each arm, and the runs."""
    found: list[Task] = []
    pretrained: dict[str | None, Task] = {}
    for corpus in study.corpora:
        config, folder = changed(study.config, study.pretrained(family, corpus)), _parent(runs, family, corpus)
        make = lambda config=config, corpus=corpus: _pretrain(config, family, corpus, runs, should_stop)
        file = out / "pretraining" / f"{folder.name}.jsonl"
        pretrained[corpus] = Task(folder.name, file, _hash(config, study.data, corpus), [], make, folder)
    rates: dict[str, Task] = {}
    for arm in study.arms:
        name, parent = _word(family, arm.name), pretrained.get(arm.corpus)
        config = study.of(family, arm, runs, study.tuned_share)
        known = _hash(config, study.data, study.tuning_steps, parent and parent.known)
        needs = [parent.file] if parent else []
        make = lambda config=config, arm=arm, needs=needs: _tune(study, config, family, arm, needs, runs, should_stop)
        rates[arm.name] = Task(f"rate_{name}", out / "rates" / f"{name}.jsonl", known, needs, make)
    for share, seed, arm in itertools.product(study.shares, study.seeds, study.arms):
        config, rate = study.of(family, arm, runs, share, seed), rates[arm.name]
        name = _word(family, arm.name, f"{share:g}", "seed", str(seed))
        at = {"family": family, "arm": arm.name, "share": share, "seed": seed}
        make = lambda at=at, config=config, rate=rate, name=name: _run(at, config, rate.file, runs / name, should_stop)
        known = _hash(config, rate.known)
        found.append(Task(name, out / "runs" / f"{name}.jsonl", known, [*rate.needs, rate.file], make))
    return [*pretrained.values(), *rates.values(), *found]


def _check(study: Transfer, family: str) -> None:
    """Checks the configs that a family needs."""
    check_runs(study.config, {f"{family}, {corpus}": study.pretrained(family, corpus) for corpus in study.corpora})
    check_runs(study.config, {f"{family}, {arm.name}": {"model.family": family, **arm.changes} for arm in study.arms})


def _pretrain(config: Any, family: str, corpus: str, runs: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    at, folder = {"family": family, "pretraining": corpus}, _parent(runs, family, corpus)
    try:
        train_whole(config, folder, should_stop)
    except NonfiniteError as error:
        shutil.rmtree(folder)
        return [{**at, "failed": str(error)}]
    return [score | at for score in evaluate(folder, "validation")]


def _tune(
    study: Transfer,
    config: Any,
    family: str,
    arm: Arm,
    needs: Sequence[pathlib.Path],
    runs: pathlib.Path,
    should_stop: ShouldStop,
) -> list[Line]:
    """Rates on the validation split: a part of the texts with labels that no run learns from."""
    if failures := [failure for file in needs if (failure := _failure(file))]:
        return [{"model": family, "failed": f"pretraining: {failures[0]}"}]
    folder, budget = runs / f"rate_{_word(family, arm.name)}", study.tuning_steps * parse(config).data.tokens_per_batch
    warmup = {"train.warmup_steps": None}  # in proportion to each run of the search
    return tune(config, {family: warmup}, "train.learning_rate", budget, folder, should_stop)


def _run(at: Line, config: Any, rates: pathlib.Path, folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    if failure := _failure(rates):
        return [{**at, "failed": failure}]
    (best,) = best_values(read_jsonl(rates))
    at = at | {"rate": best["value"]}
    if "failed" in best:
        return [{**at, "failed": f"no learning rate stays finite: {best['failed']}"}]
    try:
        train_whole(changed(config, {"train.learning_rate": best["value"]}), folder, should_stop)
        return [score | at for score in evaluate(folder, "test")]
    except NonfiniteError as error:
        return [{**at, "failed": str(error)}]


def _failure(file: pathlib.Path) -> str | None:
    """Why the task of a file has no result; None: it has one."""
    lines = read_jsonl(file)
    return lines[0].get("failed") if len(lines) == 1 else None


def _parent(runs: pathlib.Path, family: str, corpus: str) -> pathlib.Path:
    return runs / f"{family}_{corpus}"


def _hash(config: Any, *more: Any) -> str:
    """Of a config and what else a task depends on; where files lie does not matter."""
    places = {"train.init_from": None, "data.tokenizer_path": None}
    return config_hash([run_hash(changed(config, places).to_dict()), *more])


def _word(*parts: str) -> str:
    return "_".join(parts).replace(" ", "_").replace("-", "_")
