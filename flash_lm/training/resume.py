"""Opens a run's folder for training, and finds where the run starts: at a checkpoint, at its parent's, or new."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from flash_lm.config.addresses import check_local
from flash_lm.config.experiment import Config
from flash_lm.data.share import Share
from flash_lm.data.splits import Splits
from flash_lm.data.token_cache import OwnCorpus
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import save_tokenizer
from flash_lm.errors import InputError
from flash_lm.runs.hosts import is_first, of_all_hosts
from flash_lm.runs.labels import write_labels
from flash_lm.runs.lock import lock_folder
from flash_lm.runs.run_folder import RunFolder, is_export
from flash_lm.runs.run_name import RunName, run_name
from flash_lm.training import checkpoint_read
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.init_from import initial_state, tokenizer_of
from flash_lm.training.resolve import Resolved, resolve, with_types
from flash_lm.training.setup import Experiment, Setup
from flash_lm.training.train_state import TrainState, init_state


class Seen(NamedTuple):
    """What another process may change in a run's folder.

    Attributes:
        newest: step of the newest checkpoint, intact or not; None: there is none.
        is_new: whether there is no config.json yet.
        changes: lines of changes.jsonl.
    """

    newest: int | None
    is_new: bool
    changes: int


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A run's folder, while this process holds its lock.

    Attributes:
        folder: the folder.
        seen: what there was in it.
        resolved: the config to go on with.
        parent: the checkpoint that a branch starts from and its folder, if the run has no checkpoint of its own.
    """

    folder: RunFolder
    seen: Seen
    resolved: Resolved
    parent: tuple[RunName, RunFolder] | None

    @property
    def newest(self) -> int | None:
        """Step of the newest checkpoint, intact or not; None: there is none."""
        return self.seen.newest

    @property
    def config(self) -> Config:
        """The config that runs, but for what the corpus defines."""
        return self.resolved.config

    def own_corpus(self) -> OwnCorpus | None:
        """What the run or its parent knows of its corpus; None: nothing yet."""
        known = checkpoint_read.own_corpus(self.parent[1] if self.parent else self.folder, self.config.data.path)
        init_from = self.config.train.init_from
        return known or (OwnCorpus(tokenizer_of(init_from, self.config)) if init_from else None)

    def begin(self, tokenizer: Tokenizer, labels: Sequence[str] = ()) -> None:
        """Writes the files that a run has before its first step, and records what this resume changes.

        Raises:
            InputError: the run had checkpoints, and they are gone.
        """
        if self.newest is None and not self.seen.is_new:
            self.folder.check_nothing_lost()
        of_all_hosts(None)  # all hosts have looked
        if is_first():
            path = self.folder.path
            if self.seen.is_new:
                write_labels(path, labels)
                self.folder.write(self.resolved.record)
            elif self.resolved.changes:
                self.folder.record_changes({key: now for key, (_, now) in self.resolved.changes.items()})
            if not (path / "tokenizer").exists():
                partial = path / "tokenizer.partial"
                save_tokenizer(tokenizer, partial)
                os.replace(partial, path / "tokenizer")
        of_all_hosts(None)


@contextlib.contextmanager
def open_run(workdir: pathlib.Path, asked: Any) -> Iterator[OpenRun]:
    """Locks a folder for a run of this config; the folder is unchanged if nothing comes of it.

    Raises:
        InputError: a bad config; or the folder holds something else, a run of another config, or a run that another
            process is training.
    """
    check_local(workdir)
    asked = with_types(asked)
    run = _open(RunFolder(workdir), asked)  # before the lock: a folder that is refused is left as it is
    with lock_folder(workdir):
        # Another process may have trained here between the look and the lock. All hosts look again, or none does: the
        # look has exchanges between them.
        unchanged = run.seen == _look(run.folder)
        yield run if all(of_all_hosts(unchanged)) else _open(RunFolder(workdir), asked)


def _look(folder: RunFolder) -> Seen:
    return Seen(max(checkpoint_read.steps(folder.path), default=None), not folder.holds_run(), folder.changes())


def _open(folder: RunFolder, asked: Any) -> OpenRun:
    seen = _look(folder)
    branch_from, init_from = (asked.train.branch_from, asked.train.init_from) if seen.newest is None else (None, None)
    parent = _parent(branch_from) if branch_from else None
    resolved = resolve(asked, None if seen.is_new else folder, parent[1] if parent else None, init_from)
    return OpenRun(folder, seen, resolved, parent)


def _parent(branch_from: str) -> tuple[RunName, RunFolder]:
    """The checkpoint that a branch starts from, and its folder."""
    name = run_name(branch_from)
    if is_export(name.workdir):
        raise InputError(
            f"{name.workdir} is an exported model without a training state: use train.init_from={name.workdir}"
        )
    if name.ema:
        raise InputError(f"train.branch_from={name} is an average: leave @ema out, or use train.init_from")
    return name, RunFolder(name.workdir)


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts or continues.

    Attributes:
        experiment: the experiment, with the constants of the checkpoint.
        state: the checkpoint's state, or the first one.
        facts: the checkpoint's facts; empty for a new run.
        share: what this host reads of a batch.
        place: position in a streamed corpus.
        message: a sentence if it starts from another run; its first state is then saved, since the other may change.
    """

    experiment: Experiment
    state: TrainState
    facts: checkpoint_read.Facts
    share: Share
    place: dict[str, Any] | None
    message: str | None


def find_start(experiment: Experiment, checkpoints: Checkpoints | None, run: OpenRun) -> Start:
    """The newest checkpoint of a run, or that of a new branch's parent, or a new state.

    Raises:
        InputError: no intact checkpoint, another corpus, or a stream on another number of hosts; nothing is written.
    """
    share, message = experiment.share(), None
    if checkpoints is not None:
        state, facts = checkpoints.restore_newest(experiment.abstract)
    elif run.parent:
        parent, folder = run.parent
        state, facts = checkpoint_read.restore(parent, experiment.abstract, run=folder)
    else:
        return _first(experiment, share)
    _check_corpus(facts, experiment.corpus)
    if checkpoints is None and run.parent:
        parent, folder = run.parent
        step, steps = int(state.step), experiment.config.train.steps
        if step >= steps:
            raise InputError(f"{parent} has done {step} steps, and train.steps={steps} must be more: raise it")
        facts |= {"parent": checkpoint_read.identity(parent, folder, step, state.params, facts)}
        message = f"branching from {parent} at step {step}"
    experiment = experiment.with_constants(state.constants)
    return Start(experiment, state, facts, share, _place(facts.get("places"), share), message)


def _first(experiment: Experiment, share: Share) -> Start:
    """The first step, with new parameters or another model's."""
    state = new_state(experiment)
    if not experiment.config.train.init_from:
        return Start(experiment, state, {}, share, None, None)
    initial = initial_state(experiment, state)
    experiment = experiment.with_constants(initial.state.constants)
    return Start(experiment, initial.state, {"parent": initial.parent}, share, None, initial.message)


def _check_corpus(facts: checkpoint_read.Facts, corpus: Splits) -> None:
    if corpus.fingerprint != facts["corpus"]:
        raise InputError(
            f"corpus {corpus.name} is not the one that the run began with: its content has changed; restore it, or "
            f"choose another --workdir"
        )
    checkpoint_read.check_tokenizer(facts, corpus.tokenizer)


def _place(places: list[Any] | None, share: Share) -> Any:
    """The position of this host in a streamed corpus."""
    if not places:
        return None
    if len(places) != share.groups:
        raise InputError(
            f"the run streams its corpus on {len(places)} hosts, but here are {share.groups}: use the same number, or "
            f"set --config.data.streaming=false and choose another --workdir"
        )
    return places[share.group]


def new_state(setup: Setup) -> TrainState:
    """The state before the first step; each array is created with its sharding."""
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract)

    def init() -> TrainState:
        return init_state(setup.model, setup.optimizer, setup.config.carried_rows, setup.config.train.ema > 0)

    return jax.jit(init, out_shardings=shardings)()
