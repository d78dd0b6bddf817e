"""Checkpoints through Orbax: asynchronous, with checksums, the newest n and the best, restored onto any mesh."""

import contextlib
import json
import logging
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from flash_lm.errors import InputError, RunError
from flash_lm.training.fingerprint import fingerprint
from flash_lm.training.hosts import is_first, of_all_hosts
from flash_lm.training.state import Params, TrainState

_log = logging.getLogger(__name__)
_CHECKSUMS = "checksums"  # key of the facts
_PARTS = ("state", "facts")  # of a checkpoint's folder
Restored = TypeVar("Restored")


class Checkpoints:
    """The checkpoints of one run: the train state, and a small dict of facts about the run (the clock, hashes)."""

    def __init__(self, workdir: pathlib.Path, *, keep: int = 1, best_metric: str = "loss", read_only: bool = False):
        """Opens workdir/checkpoints.

        Args:
            workdir: of the run.
            keep: number of the newest that are kept.
            best_metric: name of the metric whose lowest value is kept too.
            read_only: touch nothing, so that a run that is writing at this moment is not disturbed.

        Raises:
            InputError: there are checkpoints, and all have lost a part.
        """

        def rank(metrics: dict[str, float]) -> float:
            return -metrics[best_metric]  # the largest is kept

        self._workdir, self._read_only = workdir.absolute(), read_only
        if read_only:
            # Metrics are not read: they may be gone at this moment, or damaged.
            options = ocp.CheckpointManagerOptions(
                read_only=True, save_interval_steps=0, create=False, lightweight_initialize=True
            )
        else:
            self._set_incomplete_aside()
            policy = AnyPreservationPolicy(
                [LatestN(keep), BestN(get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False)]
            )
            # The policy alone does not write the metrics, and a resumed run would forget which one is the best.
            options = ocp.CheckpointManagerOptions(
                preservation_policy=policy, best_fn=rank, cleanup_tmp_directories=True
            )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def newest(self) -> int | None:
        """Step of the newest checkpoint, be it sound or not."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, facts: dict[str, Any], metrics: dict[str, float] | None) -> None:
        """Copies the state and returns; a thread writes it.

        Args:
            step: steps done.
            state: to save.
            facts: JSON.
            metrics: of an evaluation at this step, which make the checkpoint eligible as the best.

        Raises:
            RunError: this one or the one before it could not be written.
        """
        checksums = {"params": fingerprint(state.params), "rest": fingerprint(_rest(state)), "facts": _crc(facts)}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts | {_CHECKSUMS: checksums})
        )
        with self._failures_told():
            self._manager.save(step, args=items, metrics=metrics, force=True)

    def restore_newest(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest sound state, with the shapes, dtypes and shardings of `abstract`, and its facts.

        Newer ones that are damaged are warned of, and moved to workdir/damaged.

        Raises:
            InputError: there is no checkpoint, or none that is a sound one of this model and optimizer.
        """

        def restore(step: int) -> tuple[TrainState, dict[str, Any]]:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), facts=ocp.args.JsonRestore())
            restored = self._manager.restore(step, args=items)
            state, facts = restored["state"], restored["facts"]
            _check(facts, params=lambda: state.params, rest=lambda: _rest(state))
            return state, facts

        return self._newest_sound(restore)[1]

    def restore_newest_params(self, abstract: Params) -> tuple[int, Params]:
        """Step and parameters of the newest sound checkpoint, in the dtypes that they were saved in.

        Args:
            abstract: their shapes, dtypes and shardings.

        Raises as `restore_newest` does.
        """
        item = {"params": abstract}

        def restore(step: int) -> Params:
            restore_args = ocp.checkpoint_utils.construct_restore_args(item)
            state = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            restored = self._manager.restore(step, args=ocp.args.Composite(state=state, facts=ocp.args.JsonRestore()))
            params = restored["state"]["params"]
            _check(restored["facts"], params=lambda: params)
            return params

        return self._newest_sound(restore)

    def close(self) -> None:
        """Waits for what is being written.

        Raises:
            RunError: it could not be written.
        """
        with self._failures_told():
            self._manager.wait_until_finished()
        self._manager.close()

    @property
    def _folder(self) -> pathlib.Path:
        return self._workdir / "checkpoints"

    def _newest_sound(self, restore: Callable[[int], Restored]) -> tuple[int, Restored]:
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            restored = reason = None
            try:
                restored = restore(step)
            except Exception as error:  # a damaged file makes a reader raise anything
                reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            reasons = [found for found in of_all_hosts(reason) if found]
            if not reasons and restored is not None:
                if damaged and not self._read_only:
                    self._set_aside(damaged)
                    self._manager.reload()
                return step, restored
            damaged[step] = reasons[0]
            _log.warning("checkpoint %d is damaged, or of another config (%s)", step, damaged[step])
        if damaged:
            raise self._none_sound(damaged)
        raise _no_checkpoint(self._workdir)

    def _set_incomplete_aside(self) -> None:
        """Orbax stumbles over a folder that has lost a part before it restores anything."""
        steps = [int(path.name) for path in self._folder.glob("*") if path.name.isdecimal()]
        incomplete = {step: reason for step in steps if (reason := _what_is_missing(self._folder / str(step)))}
        if not incomplete:
            return
        if len(incomplete) == len(steps):
            raise self._none_sound(incomplete)
        self._set_aside(incomplete)

    def _set_aside(self, damaged: dict[int, str]) -> None:
        """Moves checkpoints to workdir/damaged, where nobody takes them for sound ones."""
        for step, reason in damaged.items():
            place = self._workdir / "damaged" / str(step)
            while place.exists():
                place = place.with_name(f"{place.name}-again")
            if is_first():
                place.parent.mkdir(exist_ok=True)
                os.replace(self._folder / str(step), place)
            _log.warning("checkpoint %d moved to %s: %s", step, place, reason)
        of_all_hosts(None)  # until it is done

    def _none_sound(self, damaged: dict[int, str]) -> InputError:
        reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
        return InputError(
            f"no checkpoint in {self._folder} is a sound one of this config ({reasons}): put a copy back, or choose "
            f"another --workdir"
        )

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            cause = str(error).splitlines()[0].rpartition(": ")[2]  # of a chain, whose links are long paths
            raise RunError(
                f"no checkpoint could be written into {self._folder} ({cause}); those before it are whole: make room, "
                f"and the same command goes on from the newest"
            ) from error


@contextlib.contextmanager
def open_checkpoints(workdir: pathlib.Path) -> Iterator[Checkpoints]:
    """The checkpoints of a run, to be read only; it may be writing at this moment.

    Raises:
        InputError: no folder of them.
    """
    if not (workdir / "checkpoints").is_dir():
        raise _no_checkpoint(workdir)
    checkpoints = Checkpoints(workdir, read_only=True)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def with_shardings(abstract: TrainState, shardings: TrainState) -> TrainState:
    """Shapes and dtypes of a state joined with its shardings, for `restore_newest`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def _no_checkpoint(workdir: pathlib.Path) -> InputError:
    return InputError(f"{workdir} has no checkpoint yet: train it first")


def _rest(state: TrainState) -> Any:
    return {"step": state.step, "opt_state": state.opt_state}


def _crc(facts: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def _check(facts: dict[str, Any], **parts: Callable[[], Any]) -> None:
    """Takes the checksums out of the facts, and raises ValueError where one is not that of its part."""
    checksums = facts.pop(_CHECKSUMS, None)
    if checksums is None:
        _log.warning("the checkpoint is older than checksums, and has none")
        return
    found = {name: fingerprint(part()) for name, part in parts.items()} | {"facts": _crc(facts)}
    if wrong := [name for name, value in found.items() if checksums.get(name) != value]:
        raise ValueError(f"checksum of {', '.join(wrong)}")


def _what_is_missing(folder: pathlib.Path) -> str | None:
    """A part of a checkpoint without which Orbax does not open its neighbours either."""
    if lost := [name for name in _PARTS if not (folder / name).exists()]:
        return f"{', '.join(lost)} missing"
    try:
        for path in folder.glob("metrics/metrics"):  # of an evaluation at this step
            json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return "its metrics are not JSON"
    return None
