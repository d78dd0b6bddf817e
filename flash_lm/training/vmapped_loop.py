"""Trains runs that differ only in seed and learning rate as one compiled program; each keeps its own folder."""

import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from flash_lm.config.experiment import Config
from flash_lm.data.packing import Rows
from flash_lm.errors import InputError, NonfiniteError
from flash_lm.layers.quadratic_core import compiled_by_xla
from flash_lm.ops.implementations import recorded
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.metrics import MetricsWriter
from flash_lm.training.microbatches import fill_microbatches, record
from flash_lm.training.resume import OpenRun, Start, find_start, open_run
from flash_lm.training.run_log import RunLog
from flash_lm.training.samples import make_sampler
from flash_lm.training.setup import build_experiment
from flash_lm.training.train_loop import (
    begin_run,
    check_run,
    choose_microbatches,
    is_due,
    open_checkpoints,
    run_loggers,
    why_finished,
)
from flash_lm.training.validation import make_validation
from flash_lm.training.vmapped_step import VmappedStep

# Values of keys of the model that no kernel serves.
_COMPILED_BY_XLA = {"kernels": ("auto", "xla"), "quadratic.implementation": ("auto", "blocked", "plain")}


def check_vmapped(config: Config) -> None:
    """Checks that runs of a config can be trained together.

    Raises:
        InputError: they cannot.
    """
    if jax.process_count() > 1:
        raise InputError("--vmap trains runs on one host, and this sweep has several: leave --vmap out")
    if config.data.streaming:
        raise InputError("--vmap needs a corpus that is not streamed: leave --vmap out, or set data.streaming=false")
    if config.train.teacher:
        raise InputError("--vmap trains runs without a teacher: leave --vmap out, or train.teacher open")
    if "trackio" in config.train.log_to:
        raise InputError(
            "--vmap and train.log_to=trackio do not go together, because Trackio has one run in a process: send the "
            "runs afterwards, with flash-lm track RUN… --to=trackio"
        )
    for key, allowed in _COMPILED_BY_XLA.items():
        if (value := config.model.get(key)) not in allowed:
            raise InputError(
                f"--vmap trains without kernels, but got model.{key}={value}: leave --vmap out, or set model.{key}=auto"
            )


def train_vmapped(
    configs: Mapping[pathlib.Path, ConfigDict], should_stop: Callable[[], bool]
) -> dict[pathlib.Path, str]:
    """Trains runs whose configs differ only in `seed` and `train.learning_rate`, as `train` trains each of them.

    Runs at different steps, for example since one of them has been trained further alone, are trained apart.

    Args:
        configs: the config of each run, by its folder.
        should_stop: called after every step; if it returns true, all runs are saved at this step, and stop early.

    Returns:
        Why it failed, for each run whose loss became non-finite, by its folder.

    Raises:
        InputError: bad config, data or folder; nothing has been written.
        RunError: a checkpoint could not be written.
    """
    started_at = time.perf_counter()
    with contextlib.ExitStack() as stack:
        # As in `train`, but all folders are checked before anything is written to one of them.
        members = [_open(stack, folder, config) for folder, config in configs.items()]
        unfinished = []
        for member in members:
            if (end := why_finished(member.start, member.run)) is not None:
                print(f"{member.run.folder.path}: {end}")
            else:
                unfinished.append(member)
        # One program for those at the same step.
        failures = {}
        by_step = lambda member: int(member.start.state.step)
        for _, together in itertools.groupby(sorted(unfinished, key=by_step), by_step):
            together = [*together]
            known = record(choose_microbatches(together[0].start, runs=len(together)).experiment)
            loop = _Loop([member.with_microbatches(known) for member in together], stack, started_at)
            failures |= loop.run(should_stop)
            if loop.stopping:
                break
        return failures


@dataclasses.dataclass(frozen=True)
class _Member:
    """A run before its first step."""

    run: OpenRun
    start: Start
    validation: Rows
    checkpoints: Checkpoints | None  # None: a new run, which has no folder for them yet

    def with_microbatches(self, known: dict[str, Any]) -> "_Member":
        """The same with as many microbatches as another run has; `known`: of `record`."""
        experiment, _ = fill_microbatches(self.start.experiment, known=known)
        return dataclasses.replace(self, start=dataclasses.replace(self.start, experiment=experiment))

    def begin(self, stack: contextlib.ExitStack) -> Checkpoints:
        """Writes what a new run begins with."""
        begin_run(self.run, self.start.experiment)
        return self.checkpoints or stack.enter_context(open_checkpoints(self.run))


def _open(stack: contextlib.ExitStack, folder: pathlib.Path, config: ConfigDict) -> _Member:
    run = stack.enter_context(open_run(folder, config))
    check_vmapped(run.config)
    # `auto` is what XLA compiles here, also on accelerators.
    compiled = dataclasses.replace(run.config, model=compiled_by_xla(run.config.model))
    experiment = build_experiment(compiled, run.known_corpus())
    validation = experiment.evaluation_rows("validation")
    check_run(experiment, run, validation)
    stack.enter_context(jax.set_mesh(experiment.mesh))
    checkpoints = stack.enter_context(open_checkpoints(run)) if run.newest is not None else None
    return _Member(run, find_start(experiment, checkpoints, run), validation, checkpoints)


class _Loop:
    """The states of several runs, and the loop `run`: step, log, evaluate, save."""

    def __init__(self, members: Sequence[_Member], stack: contextlib.ExitStack, started_at: float):
        starts = [member.start for member in members]
        experiments = [start.experiment for start in starts]
        self.config, self.step = experiments[0].config.train, int(starts[0].state.step)
        with recorded() as implementations:
            self.program = VmappedStep(experiments)
        self.batches = [start.experiment.training_batches(start.share, self.step, start.positions) for start in starts]

        # Models without constants share the compiled function that scores them.
        same = make_validation(experiments[0], members[0].validation)
        self.logs: list[RunLog] = []
        for member in members:
            own = jax.tree.leaves(member.start.state.constants) and member is not members[0]
            validate = make_validation(member.start.experiment, member.validation) if own else same
            checkpoints, path, is_first = member.begin(stack), member.run.folder.path, not self.logs
            steps = self.config.steps
            check = member.run.check_lock
            sample = make_sampler(member.start.experiment)
            loggers = run_loggers(member.run, member.start.experiment.config, self.step)
            writer = MetricsWriter(
                path,
                step=self.step,
                steps=steps,
                check_lock=check,
                name=path.name,
                bar=is_first,
                open_loggers=loggers,
            )
            stack.enter_context(contextlib.closing(writer))
            self.logs.append(
                RunLog(member.start, validate, checkpoints, writer, implementations, len(members), sample=sample)
            )
        self.messages = [start.message for start in starts]
        self.folders = [member.run.folder.path for member in members]
        self.states = self.program.stack([start.state for start in starts])

        # The runs that are still trained, by their number; the program computes the others, too.
        self.active = dict(enumerate(self.logs))
        self.failures: dict[pathlib.Path, str] = {}
        self.pending: tuple | None = None  # number and metrics of a step that is not logged yet
        self.started_at: float | None = started_at  # None: the first step has been reported
        self.stopping = False

    def run(self, should_stop: Callable[[], bool]) -> dict[pathlib.Path, str]:
        """Trains; returns why runs failed, by folder."""
        self.logs[0].announce(self.program.select(self.states, 0))
        for number, message in enumerate(self.messages):
            if message:  # save now: the parent may change or vanish later
                self.logs[number].save(self.step, self.program.select(self.states, number), None)
                self.logs[number].checkpoints.wait()
        self._start_clocks()

        while self.step < self.config.steps and not self.stopping and self.active:
            self._take_step()
            self.stopping = should_stop()
            # Evaluate and save, as a single run does.
            last = self.step == self.config.steps
            evaluates, saves = (
                last or is_due(self.step, n) for n in (self.config.eval_every, self.config.checkpoint_every)
            )
            if evaluates or saves or self.stopping:
                with self._pause():
                    for number, log in [*self.active.items()]:
                        with self._catch(number):
                            self._evaluate_and_save(number, log, evaluates, saves or self.stopping)
        for log in self.active.values():
            log.say_end(self.step)
        return self.failures

    def _take_step(self) -> None:
        """Dispatches one step of all runs, then logs the step before while the device works."""
        batches = [next(batches) for batches in self.batches]
        self.states, metrics = self.program(self.states, batches)
        self.step += 1
        if self.started_at is not None:
            jax.block_until_ready(self.states)
            seconds, self.started_at = time.perf_counter() - self.started_at, None
            for log in self.logs:
                log.first_step_s = seconds
            print(f"first step of {len(self.logs)} runs done {seconds:.1f} s after the start", flush=True)
        self._log_pending()
        self.pending = (self.step, metrics)

    def _log_pending(self) -> None:
        if self.pending is not None:
            step, metrics = self.pending
            metrics = jax.device_get(metrics)  # waits for that step
            for number, log in [*self.active.items()]:
                with self._catch(number):
                    log.write(step, {name: float(x[number]) for name, x in metrics.items()})
        self.pending = None

    def _evaluate_and_save(self, number: int, log: RunLog, evaluates: bool, saves: bool) -> None:
        state = self.program.select(self.states, number)
        scores = log.evaluate(self.step, state) if evaluates else None
        if saves or log.reached is not None:
            log.save(self.step, state, scores)
        if log.reached is not None:
            log.say_end(self.step)
            del self.active[number]

    @contextlib.contextmanager
    def _catch(self, number: int) -> Iterator[None]:
        """Ends a run whose loss became non-finite; the others go on."""
        try:
            yield
        except NonfiniteError as error:
            self.failures[self.folders[number]] = str(error)
            del self.active[number]

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Logs the pending step, waits for the device, and stops all clocks during the block."""
        self._log_pending()
        jax.block_until_ready(self.states)
        for log in self.logs:
            log.clock.pause()
        yield
        self._start_clocks()

    def _start_clocks(self) -> None:
        for log in self.logs:
            log.clock.start()
