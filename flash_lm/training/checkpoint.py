"""Checkpoints through Orbax: asynchronous, the newest n and the best, restored onto any mesh."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from flash_lm.errors import InputError
from flash_lm.training.state import Params, TrainState


class Checkpoints:
    """The checkpoints of one run: the train state, and a small dict of facts about the run (the clock, hashes)."""

    def __init__(self, workdir: pathlib.Path, *, keep: int = 1, best_metric: str = "loss", read_only: bool = False):
        """Opens workdir/checkpoints.

        Args:
            workdir: of the run.
            keep: number of the newest that are kept.
            best_metric: name of the metric whose lowest value is kept too.
            read_only: touch nothing, so that a run that is writing at this moment is not disturbed.
        """

        def rank(metrics: dict[str, float]) -> float:
            return -metrics[best_metric]  # the largest is kept

        policy = AnyPreservationPolicy(
            [LatestN(keep), BestN(get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False)]
        )
        options = (
            ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
            if read_only
            else ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        )
        self._manager = ocp.CheckpointManager((workdir / "checkpoints").absolute(), options=options)

    def newest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, facts: dict[str, Any], metrics: dict[str, float] | None) -> None:
        """Copies the state and returns; a thread writes it.

        Args:
            step: steps done.
            state: to save.
            facts: JSON.
            metrics: of an evaluation at this step, which make the checkpoint eligible as the best.
        """
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        self._manager.save(step, args=items, metrics=metrics, force=True)

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state at `step`, with the shapes, dtypes and shardings of `abstract`, and the facts.

        Raises:
            InputError: the checkpoint is of another model or optimizer.
        """
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), facts=ocp.args.JsonRestore())
        restored = self._restore(step, items)
        return restored["state"], restored["facts"]

    def restore_params(self, step: int, abstract: Params) -> Params:
        """The parameters alone, with the shapes, dtypes and shardings of `abstract`.

        Raises:
            InputError: the checkpoint is of another model.
        """
        item = {"params": abstract}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        state = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        return self._restore(step, ocp.args.Composite(state=state))["state"]["params"]

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _restore(self, step: int, items: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=items)
        except (ValueError, KeyError) as error:
            reason = str(error).splitlines()[0][:200]
            raise InputError(f"checkpoint {step} does not fit this config: {reason}") from None


@contextlib.contextmanager
def open_newest(workdir: pathlib.Path) -> Iterator[tuple[Checkpoints, int]]:
    """The checkpoints of a run, which may be writing at this moment, and the step of the newest.

    Raises:
        InputError: there is none.
    """
    missing = InputError(f"{workdir} has no checkpoint yet: train it first")
    if not (workdir / "checkpoints").is_dir():
        raise missing
    checkpoints = Checkpoints(workdir, read_only=True)
    try:
        newest = checkpoints.newest()
        if newest is None:
            raise missing
        yield checkpoints, newest
    finally:
        checkpoints.close()


def with_shardings(abstract: TrainState, shardings: TrainState) -> TrainState:
    """Shapes and dtypes of a state joined with its shardings, for `restore`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
