"""Opens a run's folder for training, and restores its start: its checkpoint, its parent's, or a new state."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from flash_lm.config.experiment import Config
from flash_lm.data.share import Share
from flash_lm.data.splits import Splits
from flash_lm.data.streaming import Position
from flash_lm.data.token_cache import KnownCorpus
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import LAST_FILE, save_tokenizer
from flash_lm.errors import InputError
from flash_lm.runs.hosts import gather_from_hosts, is_first
from flash_lm.runs.labels import write_labels
from flash_lm.runs.lock import lock_folder
from flash_lm.runs.run_folder import RunFolder, is_export
from flash_lm.runs.run_name import RunName, run_name
from flash_lm.runs.storage import fill_folder, is_complete
from flash_lm.training import checkpoint_read
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.init_from import initial_state, parent_tokenizer
from flash_lm.training.resolve import Resolved, normalize, resolve
from flash_lm.training.setup import Experiment, Setup
from flash_lm.training.train_state import TrainState, init_state

_log = logging.getLogger(__name__)


class FolderState(NamedTuple):
    """The contents of a run's folder that another process may change.

    Attributes:
        newest: step of the newest checkpoint, intact or not; None: no checkpoint.
        is_new: whether config.json does not exist yet.
        changes: number of lines of changes.jsonl.
    """

    newest: int | None
    is_new: bool
    changes: int


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A run's folder, while this process holds its lock.

    Attributes:
        folder: the folder.
        folder_state: its contents when it was opened.
        resolved: the config to continue with.
        parent: the checkpoint that a branch starts from and its folder, if the run has no checkpoint yet.
        check_lock: raises RunError if another process has taken the folder.
    """

    folder: RunFolder
    folder_state: FolderState
    resolved: Resolved
    parent: tuple[RunName, RunFolder] | None
    check_lock: Callable[[], None] = lambda: None

    @property
    def newest(self) -> int | None:
        """Step of the newest checkpoint, intact or not; None: no checkpoint."""
        return self.folder_state.newest

    @property
    def config(self) -> Config:
        """The config of the run, without the keys that the corpus defines."""
        return self.resolved.config

    def known_corpus(self) -> KnownCorpus | None:
        """Tokenizer and corpus fingerprint of the run or its parent; None: a new run."""
        corpus = checkpoint_read.known_corpus(self.parent[1] if self.parent else self.folder, self.config.data.path)
        init_from = self.config.train.init_from
        return corpus or (KnownCorpus(parent_tokenizer(init_from, self.config)) if init_from else None)

    def begin(self, tokenizer: Tokenizer, labels: Sequence[str] = ()) -> None:
        """Writes config.json, labels and tokenizer of a new run, and records the changes of a resume.

        Raises:
            InputError: the run had checkpoints, and they are gone.
        """
        if self.newest is None and not self.folder_state.is_new:
            self.folder.check_nothing_lost()
        gather_from_hosts(None)  # wait until all hosts have read the folder
        # Only the first host writes; an incomplete tokenizer is written again.
        if is_first():
            path = self.folder.path
            if self.folder_state.is_new:
                write_labels(path, labels)
                self.folder.write(self.resolved.record)
            elif self.resolved.changes:
                self.folder.record_changes({key: now for key, (_, now) in self.resolved.changes.items()})
            if not is_complete(path / "tokenizer", LAST_FILE):
                with fill_folder(path / "tokenizer") as partial:
                    save_tokenizer(tokenizer, partial)
        gather_from_hosts(None)


@contextlib.contextmanager
def open_run(workdir: str | os.PathLike[str], asked: Any) -> Iterator[OpenRun]:
    """Locks a folder for a run of this config; the folder is unchanged if the run is refused.

    Raises:
        InputError: a bad config; or the folder holds something else, or a run of another config.
        PassingError: another process is training the run.
    """
    asked = normalize(asked)
    run = resolve_run(RunFolder(workdir), asked)  # before the lock: a folder that is refused is left as it is
    with lock_folder(run.folder.path) as check_lock:
        # Another process may have trained in the folder before it was locked. Either all hosts read it again or none
        # does, because reading exchanges data between hosts.
        unchanged = run.folder_state == _read_folder_state(run.folder)
        run = run if all(gather_from_hosts(unchanged)) else resolve_run(RunFolder(workdir), asked)
        yield dataclasses.replace(run, check_lock=check_lock)


def _read_folder_state(folder: RunFolder) -> FolderState:
    return FolderState(
        max(checkpoint_read.checkpoint_steps(folder.path), default=None), not folder.holds_run(), folder.changes()
    )


def resolve_run(folder: RunFolder, asked: Any) -> OpenRun:
    """Resolves a config for a folder, which is only read; it may not exist yet.

    The parent of a branch counts only before the run's first checkpoint.

    Args:
        folder: the run's folder.
        asked: a config from `normalize`.

    Raises:
        InputError: a bad config; or the folder holds something else, or a run of another config.
    """
    folder_state = _read_folder_state(folder)
    branch_from, init_from = (
        (asked.train.branch_from, asked.train.init_from) if folder_state.newest is None else (None, None)
    )
    parent = _find_parent(branch_from) if branch_from else None
    run, done = None if folder_state.is_new else folder, folder_state.newest or 0
    resolved = resolve(asked, run, parent[1] if parent else None, init_from, done)
    return OpenRun(folder, folder_state, resolved, parent)


def _find_parent(branch_from: str) -> tuple[RunName, RunFolder]:
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
    """The state at which a run starts or continues.

    Attributes:
        experiment: the experiment, with the constants of the checkpoint.
        state: the checkpoint's state, or the first one.
        facts: the checkpoint's facts; empty for a new run.
        share: this host's share of a batch.
        positions: position of each stream of a streamed corpus; empty: it is none, or the run is new.
        message: a sentence if it starts from another run; its first state is then saved, since the other may change.
    """

    experiment: Experiment
    state: TrainState
    facts: checkpoint_read.Facts
    share: Share
    positions: Sequence[Position]
    message: str | None


def find_start(experiment: Experiment, checkpoints: Checkpoints | None, run: OpenRun) -> Start:
    """Restores the newest checkpoint of a run, or that of a new branch's parent, or makes a new state; loads a teacher.

    Raises:
        InputError: no intact checkpoint, another corpus, or another teacher; nothing is written.
    """
    start = _find_start(experiment, checkpoints, run)
    if (teacher := experiment.teacher) is None:
        return start
    teacher = teacher.load(experiment.config, experiment.corpus.tokenizer, start.facts.get("teacher"))
    return dataclasses.replace(
        start,
        experiment=dataclasses.replace(start.experiment, teacher=teacher),
        facts=start.facts | {"teacher": teacher.identity},
    )


def _find_start(experiment: Experiment, checkpoints: Checkpoints | None, run: OpenRun) -> Start:
    # The state: from the run itself, from its parent, or new.
    share, message = experiment.share(), None
    if checkpoints is not None:
        state, facts = checkpoints.restore_newest(experiment.abstract)
    elif run.parent:
        parent, folder = run.parent
        state, facts = checkpoint_read.restore(parent, experiment.abstract, run=folder)
    else:
        return _new_start(experiment, share)

    # The corpus must be the same; a branch must have steps left, and records its parent.
    _check_corpus(facts, experiment.corpus)
    if checkpoints is None and run.parent:
        parent, folder = run.parent
        step, steps = int(state.step), experiment.config.train.steps
        if step >= steps:
            raise InputError(f"{parent} has done {step} steps, and train.steps={steps} must be more: raise it")
        facts |= {"parent": checkpoint_read.identity(parent, folder, step, state.params, facts)}
        message = f"branching from {parent} at step {step}"
    experiment = experiment.replace_constants(state.constants)
    return Start(experiment, state, facts, share, _positions(facts, share), message)


def _new_start(experiment: Experiment, share: Share) -> Start:
    """The start of a new run, with new parameters or those of train.init_from."""
    state = new_state(experiment)
    if not experiment.config.train.init_from:
        return Start(experiment, state, {}, share, (), None)
    initial = initial_state(experiment, state)
    experiment = experiment.replace_constants(initial.state.constants)
    return Start(experiment, initial.state, {"parent": initial.parent}, share, (), initial.message)


def _check_corpus(facts: checkpoint_read.Facts, corpus: Splits) -> None:
    if corpus.fingerprint != facts["corpus"]:
        raise InputError(
            f"corpus {corpus.name} is not the one that the run began with: its content has changed; restore it, or "
            f"choose another --workdir"
        )
    checkpoint_read.check_tokenizer(facts, corpus.tokenizer)


def _positions(facts: checkpoint_read.Facts, share: Share) -> Sequence[Position]:
    """The saved position of each stream; says so if hosts will read the same streams."""
    positions = facts.get("places") or ()
    if positions and share.groups > len(positions) and is_first():
        _log.info(
            "the corpus is read as %d streams since the run began: several of %d hosts read and tokenise the same one",
            len(positions),
            share.groups,
        )
    return positions


def new_state(setup: Setup) -> TrainState:
    """Initialises the state before the first step; each array is created with its sharding."""
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract)

    def init() -> TrainState:
        return init_state(setup.model, setup.optimizer, setup.config.carried_rows, setup.config.train.ema > 0)

    return jax.jit(init, out_shardings=shardings)()
