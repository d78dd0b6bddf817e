"""Checkpoints through Orbax: asynchronous, with checksums, the newest n and the best, restored onto any mesh."""

import contextlib
import json
import logging
import math
import os
import pathlib
import re
import typing
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from flash_lm.errors import InputError, RunError, first_line
from flash_lm.training import workdir as run_folder
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
            value = metrics.get(best_metric)  # the largest rank is kept
            return -value if isinstance(value, float) and math.isfinite(value) else -math.inf

        self._workdir, self._read_only = workdir.absolute(), read_only
        self._config = run_folder.fingerprint(workdir)
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
        facts = facts | {"step": step, "config": self._config}
        checksums = {"params": fingerprint(state.params), "rest": fingerprint(_rest(state)), "facts": _crc(facts)}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts | {_CHECKSUMS: checksums})
        )
        with self._failures_told():
            self._manager.save(step, args=items, metrics=metrics, force=True)

    def wait(self) -> None:
        """Waits for what is being written.

        Raises:
            RunError: it could not be written.
        """
        with self._failures_told():
            self._manager.wait_until_finished()

    def restore_newest(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest sound state, with the shapes, dtypes and shardings of `abstract`, and its facts.

        Newer ones that are damaged are warned of, and moved to workdir/damaged.

        Raises:
            InputError: there is no checkpoint, or none that is a sound one of this model and optimizer.
        """
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), facts=ocp.args.JsonRestore())
        parts = lambda state: {"params": state.params, "rest": _rest(state)}
        _, state, facts = self._newest_sound(items, parts)
        return state, facts

    def restore_newest_params(self, abstract: Params) -> tuple[int, Params]:
        """Step and parameters of the newest sound checkpoint, in the dtypes that they were saved in.

        Args:
            abstract: their shapes, dtypes and shardings.

        Raises as `restore_newest` does.
        """
        item = {"params": abstract}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        state = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        items = ocp.args.Composite(state=state, facts=ocp.args.JsonRestore())
        step, found, _ = self._newest_sound(items, lambda state: state)
        return step, found["params"]

    def close(self) -> None:
        """Waits for what is being written; raises as `wait` does."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if kind is None:
            self.close()
        else:  # which is what is to be told
            with contextlib.suppress(Exception):
                self.close()

    @property
    def _folder(self) -> pathlib.Path:
        return self._workdir / "checkpoints"

    def _newest_sound(
        self, items: ocp.args.Composite, parts: Callable[[Any], dict[str, Any]]
    ) -> tuple[int, Any, dict[str, Any]]:
        """Step, state and facts; `parts`: of the state, by the names of their checksums."""
        damaged: dict[int, str] = {}
        while steps := [step for step in self._manager.all_steps() if step not in damaged]:
            step = max(steps)
            read = self._on_all_hosts(partial(self._read, step, items))
            if not isinstance(read, str):
                state, facts = read
                # Apart from reading, since all hosts must take part in it.
                read = self._on_all_hosts(partial(_checked, facts, parts(state)))
            if not isinstance(read, str):
                if damaged and not self._read_only:
                    self._set_aside(damaged)
                    self._manager.reload()
                return step, state, read
            if self._read_only and not (self._folder / str(step)).exists():
                self._manager.reload()  # a run that goes on has deleted it meanwhile
                continue
            damaged[step] = read
            _log.warning("checkpoint %d is damaged, or of another config (%s)", step, read)
        raise self._none_sound(damaged) if damaged else _no_checkpoint(self._workdir)

    def _read(self, step: int, items: ocp.args.Composite) -> tuple[Any, dict[str, Any]]:
        restored = self._manager.restore(step, args=items)
        facts = restored["facts"]
        if (facts.get("step", step), facts.get("config", self._config)) != (step, self._config):
            raise ValueError("it was saved by another run, or at another step")
        return restored["state"], facts

    def _on_all_hosts(self, work: Callable[[], Restored]) -> Restored | str:
        """What `work` gives, or why it failed on a host: what one host has found, all believe."""
        done = reason = None
        try:
            done = work()
        except MemoryError:
            raise
        except Exception as error:  # a damaged file makes a reader raise anything
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            reason = first_line(error)
        reasons = [found for found in of_all_hosts(reason) if found]
        return reasons[0] if reasons else typing.cast(Restored, done)

    def _set_incomplete_aside(self) -> None:
        """Orbax stumbles over a folder that has lost a part before it restores anything."""
        steps = [int(path.name) for path in self._folder.glob("*") if re.fullmatch("0|[1-9][0-9]*", path.name)]
        incomplete = {step: reason for step in steps if (reason := _what_is_missing(self._folder / str(step)))}
        # What the first host has seen, before it moves anything.
        steps, incomplete = of_all_hosts([steps, sorted(incomplete.items())])[0]
        incomplete = dict(incomplete)
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
        except (jax.errors.JaxRuntimeError, StepAlreadyExistsError):
            raise
        except (OSError, ValueError, RuntimeError) as error:
            cause = (str(error) or repr(error)).splitlines()[0].rpartition(": ")[2]  # of a chain of long paths
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
    with Checkpoints(workdir, read_only=True) as checkpoints:
        yield checkpoints


def with_shardings(abstract: TrainState, shardings: TrainState) -> TrainState:
    """Shapes and dtypes of a state joined with its shardings, for `restore_newest`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def _no_checkpoint(workdir: pathlib.Path) -> InputError:
    return InputError(f"{workdir} has no checkpoint yet: train it first")


def _rest(state: TrainState) -> Any:
    return {"step": state.step, "opt_state": state.opt_state}


def _crc(facts: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def _checked(facts: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """The facts without what `save` has added; raises ValueError where a checksum is not that of its part."""
    checksums = facts.pop(_CHECKSUMS, None)
    if checksums is None and "step" not in facts:
        _log.warning("the checkpoint is older than checksums, and has none")
        return facts
    found = {name: fingerprint(part) for name, part in parts.items()} | {"facts": _crc(facts)}
    if wrong := [name for name, value in found.items() if (checksums or {}).get(name) != value]:
        raise ValueError(f"checksum of {', '.join(wrong)}")
    return {name: value for name, value in facts.items() if name not in ("step", "config")}


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
