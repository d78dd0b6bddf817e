"""Writes checkpoints through Orbax: asynchronous, with checksums; the newest n and the best are kept."""

import contextlib
import errno
import json
import logging
import math
import os
import pathlib
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from flash_lm.errors import PassingError, RunError
from flash_lm.runs.hosts import gather_from_hosts, is_first
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import NEWEST, RunName
from flash_lm.runs.storage import explain_errors, move_folder
from flash_lm.training import checkpoint_read
from flash_lm.training.train_state import TrainState

_log = logging.getLogger(__name__)
# What the error of a failed write contains -> what to do about it.
_NETWORK = "check the network"
_ADVICE = {
    os.strerror(errno.ENOSPC): "make room",
    os.strerror(errno.EDQUOT): "make room",
    os.strerror(errno.EFBIG): "make room",
    os.strerror(errno.EACCES): "allow writing there",
    os.strerror(errno.EROFS): "allow writing there",
    os.strerror(errno.EIO): "check the disk",
    # Of an object store.
    "PERMISSION_DENIED": "allow writing there",
    "Forbidden": "allow writing there",
    "UNAVAILABLE": _NETWORK,
    "DEADLINE_EXCEEDED": _NETWORK,
}


class Checkpoints:
    """The checkpoints of a training run: the train state, and a small dict of facts (the clock, hashes)."""

    def __init__(
        self, workdir: pathlib.Path, *, run: RunFolder | None = None, keep: int = 1, best_metric: str = "loss"
    ):
        """Opens workdir/checkpoints, and moves incomplete checkpoints to workdir/damaged.

        Args:
            workdir: folder of the run.
            run: the same, if it has been read already.
            keep: number of newest checkpoints to keep.
            best_metric: name of a metric; the checkpoint with its lowest value is also kept.

        Raises:
            InputError: there are checkpoints, and all are incomplete.
        """

        def rank(metrics: dict[str, float]) -> float:
            value = metrics.get(best_metric)  # the largest rank is kept
            return -value if isinstance(value, float) and math.isfinite(value) else -math.inf

        # Orbax opens every folder when it starts, and fails on an incomplete one.
        self._workdir, self._run = workdir, run or RunFolder(workdir)
        self._quarantine_incomplete()

        # What is kept: the newest `keep`, and the best.
        policy = AnyPreservationPolicy(
            [LatestN(keep), BestN(get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False)]
        )
        # The policy alone does not write the metrics, and a resumed run would not know which one is the best.
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, best_fn=rank, cleanup_tmp_directories=True)
        with explain_errors(self._folder):
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def newest(self) -> int | None:
        """Step of the newest checkpoint, whether intact or not."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: TrainState, facts: checkpoint_read.Facts, metrics: dict[str, float] | None
    ) -> None:
        """Copies the state to the host and returns; a thread writes the copy.

        Args:
            step: number of steps done.
            state: state to save.
            facts: JSON values.
            metrics: metrics of an evaluation at this step, so that the checkpoint can be the best.

        Raises:
            RunError: this checkpoint or the one before could not be written.
        """
        facts, tree = (
            facts | {"step": step, "config": self._run.fingerprint},
            checkpoint_read.state_tree(state),
        )
        sums = checkpoint_read.checksums(tree) | {"facts": checkpoint_read.facts_checksum(facts)}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(tree), facts=ocp.args.JsonSave(facts | {checkpoint_read.CHECKSUMS: sums})
        )
        with self._report_failures():
            self._manager.save(step, args=items, metrics=metrics, force=True)

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            RunError: a checkpoint could not be written.
        """
        with self._report_failures():
            self._manager.wait_until_finished()

    def restore_newest(self, abstract: TrainState) -> tuple[TrainState, checkpoint_read.Facts]:
        """Restores the newest intact checkpoint; newer ones that are damaged are moved to workdir/damaged."""
        damaged: dict[int, str] = {}
        restored = checkpoint_read.restore(RunName(self._workdir, NEWEST), abstract, damaged, self._run)
        if damaged:
            self._quarantine(damaged)
            self._manager.reload()
        return restored

    def close(self) -> None:
        """Waits until everything is written; raises as `wait` does."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if kind is None:
            self.close()
        else:  # so that this exception is the one reported
            with contextlib.suppress(Exception):
                self.close()

    @property
    def _folder(self) -> pathlib.Path:
        return checkpoint_read.checkpoint_folder(self._workdir)

    def _quarantine_incomplete(self) -> None:
        """Moves incomplete checkpoints to workdir/damaged: Orbax fails on them before it restores anything."""
        steps = checkpoint_read.checkpoint_steps(self._workdir)
        incomplete = [(step, reason) for step in steps if (reason := _find_damage(self._folder / str(step)))]
        incomplete = dict(gather_from_hosts(incomplete)[0])  # as the first host saw it, before it moves anything
        if not incomplete:
            return
        if len(incomplete) == len(steps):
            raise checkpoint_read.no_intact_checkpoint(self._workdir, incomplete)
        self._quarantine(incomplete)

    def _quarantine(self, damaged: dict[int, str]) -> None:
        """Moves checkpoints to workdir/damaged, so that they are not used."""
        for step, reason in damaged.items():
            target = self._workdir / "damaged" / str(step)
            while target.exists():
                target = target.with_name(f"{target.name}-again")
            if is_first():
                move_folder(self._folder / str(step), target)
            _log.warning("checkpoint %d moved to %s: %s", step, target, reason)
        gather_from_hosts(None)  # wait until it is done

    @contextlib.contextmanager
    def _report_failures(self) -> Iterator[None]:
        """Turns a failed write into a RunError of one line; any other error is a bug, and is raised unchanged."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, StepAlreadyExistsError):
            raise
        except (OSError, ValueError, RuntimeError) as error:
            # Orbax wraps the system's error, so its text is all that tells the cause.
            text = str(error) or repr(error)
            advice = next((remedy for cause, remedy in _ADVICE.items() if cause in text), None)
            if advice is None and not isinstance(error, OSError):
                raise
            cause = text.splitlines()[0].rpartition(": ")[2]  # after a chain of long paths
            kind = PassingError if advice == _NETWORK else RunError
            raise kind(
                f"no checkpoint could be written into {self._folder} ({cause}); earlier checkpoints are complete: "
                f"{advice or 'fix this'}, then run the same command to continue from the newest"
            ) from error


def attach_shardings(abstract: TrainState, shardings: TrainState) -> TrainState:
    """Combines a state's shapes and dtypes with its shardings, for `restore_newest`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def _find_damage(folder: pathlib.Path) -> str | None:
    """The reason why a checkpoint is incomplete, so that Orbax could not open the others either; None: it is not."""
    if lost := [name for name in checkpoint_read.ITEMS if not (folder / name).exists()]:
        return f"{', '.join(lost)} missing"
    try:
        if (path := folder / "metrics" / "metrics").exists():  # of an evaluation at this step
            json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "its metrics are not JSON"
    return None
