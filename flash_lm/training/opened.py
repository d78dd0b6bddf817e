"""The folder of a run, opened for training: what is in it, and that no other process trains there."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from flash_lm.config.addresses import check_local
from flash_lm.config.experiment import parse
from flash_lm.data.token_cache import OwnCorpus
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError
from flash_lm.runs import run_folder
from flash_lm.runs.lock import locked
from flash_lm.runs.run_name import RunName, run_name
from flash_lm.training import checkpoint_read
from flash_lm.training.init_from import like_parent, tokenizer_of


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A run's folder, while this process holds it.

    Attributes:
        workdir: the folder.
        config: the config to continue with; open keys are filled in from the run or its parent.
        newest: step of the newest checkpoint, intact or not; None: there is none.
        parent: the checkpoint that a branch starts from, if it has none of its own.
    """

    workdir: pathlib.Path
    config: Any
    newest: int | None
    parent: RunName | None

    def own_corpus(self) -> OwnCorpus | None:
        """What the run or its parent knows of its corpus; None: nothing yet."""
        own = checkpoint_read.own_corpus(self.parent.workdir if self.parent else self.workdir, self.config)
        init_from = self.config.train.get("init_from")
        return own or (OwnCorpus(tokenizer_of(init_from, self.config)) if init_from else None)

    def begin(self, tokenizer: Tokenizer, labels: Sequence[str] = ()) -> None:
        """Writes the files that a run has before its first step, and records what this resume changes.

        Raises:
            InputError: the run had checkpoints, and they are gone.
        """
        if self.newest is None:
            run_folder.check_nothing_lost(self.workdir)
        run_folder.write(self.workdir, self.config, tokenizer, labels)


@contextlib.contextmanager
def opened(workdir: pathlib.Path, config: Any) -> Iterator[OpenRun]:
    """Locks a folder for a run of this config; the folder is unchanged if nothing comes of it.

    Raises:
        InputError: a bad config; or the folder holds something else, a run of another config, or a run that another
            process is training.
    """
    check_local(workdir)
    parse(config)
    _look(workdir, config)  # do not lock a folder of something else
    with locked(workdir):
        yield _look(workdir, config)  # again: another process may just have finished


def _look(workdir: pathlib.Path, config: Any) -> OpenRun:
    newest = max(checkpoint_read.steps(workdir), default=None)
    branch_from = config.get("train", {}).get("branch_from")
    parent = run_name(branch_from) if branch_from and newest is None else None
    init_from = config.get("train", {}).get("init_from")
    if init_from and newest is None:
        config = like_parent(config, init_from)
    config = run_folder.check_config(workdir, config)
    if parent and parent.ema:
        raise InputError(f"train.branch_from={parent} is an average: leave @ema out, or use train.init_from")
    if parent:
        config = run_folder.check_branch(parent.workdir, config)
    if config.data.tokens_per_batch is None:  # the run keeps it, on whatever devices it goes on
        config = config.copy_and_resolve_references()
        config.data.tokens_per_batch = parse(config).data.tokens_per_batch
    return OpenRun(workdir, config, newest, parent)
