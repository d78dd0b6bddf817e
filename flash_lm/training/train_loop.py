"""The training loop: start or resume, step, log, evaluate, save."""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from ml_collections import ConfigDict

from flash_lm.config.experiment import Config
from flash_lm.config.registry import TASKS
from flash_lm.data.batches import Batch
from flash_lm.data.packing import Rows
from flash_lm.errors import InputError, PassingError
from flash_lm.ops.implementations import recorded
from flash_lm.runs.hosts import StopOfAllHosts, check_same, gather_from_hosts, is_first
from flash_lm.runs.lost_hosts import report_lost_host
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.compiled_step import CompiledStep, state_bytes
from flash_lm.training.loggers import LoggedRun, Logger, OnLog, check_loggers, open_loggers
from flash_lm.training.metrics import MetricsWriter
from flash_lm.training.microbatches import fill_microbatches
from flash_lm.training.nonfinite import Origin
from flash_lm.training.profile import Profile, Span, check_span
from flash_lm.training.resume import OpenRun, Start, find_start, open_run
from flash_lm.training.run_log import RunLog, Scores
from flash_lm.training.samples import make_sampler
from flash_lm.training.schedule_free import gradient_point
from flash_lm.training.setup import Experiment, build_experiment
from flash_lm.training.sharding import batch_sharding, check_batch, report_shared_heads, shard_batch
from flash_lm.training.step_size import explain_out_of_memory, plan_of
from flash_lm.training.validation import make_validation


def train(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    should_stop: Callable[[], bool] = lambda: False,
    profile: Span | None = None,
    debug_nonfinite: bool = False,
    started_at: float | None = None,
    on_log: OnLog | None = None,
) -> bool:
    """Trains until config.train.steps or config.train.stop_accuracy, from the newest checkpoint in `workdir` if any.

    A new run starts with a copy of the checkpoint config.train.branch_from, or with the parameters of
    config.train.init_from, if one of them is set.

    >>> from flash_lm.configs import quickstart
    >>> config = quickstart.get_config()
    >>> config.model.update(family="aft_simple", num_layers=1, model_dim=16, max_length=32)
    >>> config.data.update(corpus="text", path="text", tokenizer="bytes", length=32, tokens_per_batch=256)
    >>> config.train.update(steps=1, eval_steps=1)
    >>> train(config, "runs/example")
    aft_simple: 7,840 parameters, 8 x 32 tokens ...
    step 1: validation loss ...
    True

    Args:
        config: a config with the schema of configs/base.py.
        workdir: folder of the run; created if necessary.
        should_stop: called after every step; if it returns true, the run is saved and stops early.
        profile: steps to trace into workdir/profile; None: no trace.
        debug_nonfinite: wait for each step, and find where the first non-finite number appears.
        started_at: start of the process, in seconds of time.perf_counter; first_step_s is measured from it; None: now.
        on_log: called with step, split and values of each line of metrics.jsonl, after the loggers of train.log_to;
            what it raises ends the run.

    Returns:
        Whether the run has come to its end; otherwise it was asked to stop, and can go on.

    Raises:
        InputError: bad config, data or workdir; nothing has been written.
        RunError: the loss became non-finite, a device is out of memory, a checkpoint could not be written, or another
            host is gone.
    """
    started_at = time.perf_counter() if started_at is None else started_at
    with contextlib.ExitStack() as stack:
        stack.enter_context(report_lost_host())

        # Lock the run folder, read it once, and fill in open keys from its run or its parent run.
        run = stack.enter_context(open_run(workdir, config))

        # Corpus, model, optimizer, mesh, and the shapes of the train state.
        experiment = build_experiment(run.config, run.known_corpus())
        validation = experiment.evaluation_rows("validation")
        if debug_nonfinite and experiment.config.train.carry_state:
            raise InputError("--debug_nonfinite does not support train.carry_state=True: leave one of them out")
        if debug_nonfinite and experiment.teacher:
            raise InputError("--debug_nonfinite does not support train.teacher: leave one of them out")
        if profile:
            check_span(profile, experiment.config.train.steps)
        check_run(experiment, run, validation)
        report_shared_heads(experiment.config.model, experiment.mesh)
        stack.enter_context(jax.set_mesh(experiment.mesh))

        stack.enter_context(explain_out_of_memory(lambda: plan_of(experiment)))

        # The start. A new run makes its folder of checkpoints only when it begins, so that a refused one leaves none.
        checkpoints = stack.enter_context(open_checkpoints(run)) if run.newest is not None else None
        start = find_start(experiment, checkpoints, run)
        if (end := why_finished(start, run)) is not None:
            if is_first():
                print(f"{workdir}: {end}")
            return True
        start = choose_microbatches(start)

        # From here on the folder is written to.
        begin_run(run, experiment)
        checkpoints = checkpoints or stack.enter_context(open_checkpoints(run))
        loop = _Loop(start, validation, run, checkpoints, started_at, debug_nonfinite, on_log)
        return loop.run(should_stop, Profile(run.folder.path / "profile", profile))


def check_run(experiment: Experiment, run: OpenRun, validation: Rows) -> None:
    """Checks what needs the corpus or the devices, before anything is written.

    Raises:
        InputError: a batch does not divide over the devices, hosts differ, no token of the validation split counts, a
            tracker is not installed, or the model cannot continue train.sample_prompt.
    """
    config, corpus = experiment.config, experiment.corpus
    check_loggers(config.train.log_to)
    make_sampler(experiment)
    check_batch(experiment.mesh, config.data.batch_size, config.train.accumulate, config.data.length)
    # Hosts that differ in one of these would hang in their first exchange, or train on different data.
    check_same(
        config=run.resolved.record.to_dict(),
        corpus=corpus.fingerprint,
        tokenizer=corpus.tokenizer.fingerprint,
        checkpoint=run.newest,
    )
    if not any(validation[i]["loss_mask_BxL"].any() for i in range(len(validation))):
        raise InputError("no token of the validation split is a target: give more text, or raise data.masking.rate")


def begin_run(run: OpenRun, experiment: Experiment) -> None:
    """Writes what a new run begins with; raises as `OpenRun.begin` does."""
    corpus = experiment.corpus
    run.begin(corpus.tokenizer, corpus.labels if TASKS[experiment.config.task].labels else ())


def choose_microbatches(start: Start, runs: int = 1) -> Start:
    """The start with its number of microbatches, if that is open; `runs`: that are trained together."""
    known, taken = start.facts.get("microbatches"), runs * state_bytes(start.experiment)
    experiment, _ = fill_microbatches(start.experiment, taken=taken, known=known, runs=runs)
    return dataclasses.replace(start, experiment=experiment)


def run_loggers(
    run: OpenRun, config: Config, step: int, on_log: OnLog | None = None
) -> Callable[[pathlib.Path], Sequence[Logger]]:
    """Makes the function that opens the loggers of a run that continues after `step`, with a folder for their files."""
    workdir = run.folder.path
    about = {"name": workdir.name, "project": config.train.project, "step": step}
    record = run.resolved.record.to_dict()
    return lambda folder: open_loggers(config.train.log_to, LoggedRun(folder, config=record, **about), on_log)


def open_checkpoints(run: OpenRun) -> Checkpoints:
    """Opens the checkpoints of a run."""
    train = run.config.train
    return Checkpoints(run.folder.path, run=run.folder, keep=train.keep, best_metric=train.best_metric)


def why_finished(start: Start, run: OpenRun) -> str | None:
    """Why the run has nothing left to train; None: it has steps left."""
    train = start.experiment.config.train
    if int(start.state.step) == train.steps:
        return f"all {train.steps} steps are done"
    if train.stop_accuracy and run.newest is not None and start.facts.get("reached", 0.0) >= train.stop_accuracy:
        return f"train.stop_accuracy={train.stop_accuracy} was reached at step {start.state.step}"
    return None


class _Loop:
    """The train state, and the loop `run`: step, log, evaluate, save."""

    def __init__(
        self,
        start: Start,
        validation_rows: Rows,
        run: OpenRun,
        checkpoints: Checkpoints,
        started_at: float,
        debug_nonfinite: bool,
        on_log: OnLog | None,
    ):
        # Constant during the run.
        experiment = start.experiment
        self.start, self.experiment, self.config, self.share = start, experiment, experiment.config, start.share
        self.sharding = batch_sharding(experiment.mesh)

        # The compiled step, and which implementations it has got.
        with recorded() as implementations:
            self.compiled_step = CompiledStep(experiment)

        # Saved in checkpoints; `log` has the counters.
        self.state, self.step = start.state, int(start.state.step)
        self.batches = experiment.training_batches(self.share, self.step, start.positions)

        # The functions and writers that work on the state.
        self.origin = Origin(experiment) if debug_nonfinite else None
        steps = self.config.train.steps
        loggers = run_loggers(run, self.config, self.step, on_log)
        writer = MetricsWriter(
            run.folder.path, step=self.step, steps=steps, check_lock=run.check_lock, open_loggers=loggers
        )
        plan = plan_of(experiment, self.compiled_step.program, state_bytes(experiment))
        validate, sample = make_validation(experiment, validation_rows), make_sampler(experiment)
        self.log = RunLog(start, validate, checkpoints, writer, implementations, plan=plan, sample=sample)

        # Not logged yet: the number, metrics and batch of the last step.
        self.pending: tuple | None = None
        self.started_at: float | None = started_at  # None: the first step has been reported

    def run(self, should_stop: Callable[[], bool], profile: Profile) -> bool:
        """Trains; returns whether the run has come to its end."""
        config, stops = self.config.train, StopOfAllHosts(should_stop)
        with contextlib.closing(self.log.writer):
            self.log.announce(self.state)
            if self.start.message:  # save now: the parent may change or vanish later
                self._save(None)
                self.log.checkpoints.wait()
            self.log.clock.start()

            stopping = False
            while self.step < config.steps and not stopping and self.log.reached is None:
                # Train. The clock runs; everything else below pauses it, so that only steps are timed.
                if profile.is_due(self.step):
                    with self._pause():
                        profile.start()
                self._take_step()
                stopping = stops(self.step, self.log.clock.seconds)

                # Write a trace whose last step is done.
                last = self.step == config.steps
                if profile.is_over(self.step) or (profile.on and (last or stopping)):
                    with self._pause():
                        profile.write()
                    self.log.writer.say(
                        f"step {self.step}: trace written to {profile.folder}, for TensorBoard or ui.perfetto.dev"
                    )

                # Evaluate and save. A run that is asked to stop saves, but does not take the time to evaluate.
                evaluates, saves = (last or is_due(self.step, n) for n in (config.eval_every, config.checkpoint_every))
                if evaluates or saves or stopping:
                    with self._pause():
                        scores = self.log.evaluate(self.step, self.state) if evaluates else None
                        if saves or stopping or self.log.reached is not None:
                            self._save(scores)
            return self.log.say_end(self.step)

    def _take_step(self) -> None:
        """Loads and shards a batch, dispatches one training step, then logs the step before while the device works."""
        batch = shard_batch(self._next_batch(), self.sharding, self.share)
        self.state, metrics = self.compiled_step(self.state, batch)
        self.step += 1
        if self.started_at is not None:
            self._report_first_step(self.started_at)
        # The device works on this step while the metrics of the last one are read.
        self._log_pending()
        self.pending = (self.step, metrics, batch)
        if self.origin is not None:  # --debug_nonfinite: wait for this step at once
            self._log_pending()

    def _report_first_step(self, started_at: float) -> None:
        """Reports the time to the first step, which waits for the device once."""
        jax.block_until_ready(self.state)
        self.log.first_step_s, self.started_at = time.perf_counter() - started_at, None
        self.log.writer.say(f"first step done {self.log.first_step_s:.1f} s after the start")

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Logs the pending step, waits for the device, and stops the training clock during the block."""
        self._log_pending()
        jax.block_until_ready(self.state)
        self.log.clock.pause()
        yield
        self.log.clock.start()

    def _log_pending(self) -> None:
        if self.pending is not None:
            self._log(*self.pending)
        self.pending = None

    def _next_batch(self) -> Batch:
        """The next batch. A streamed corpus may fail at any time; the run is then logged and saved."""
        try:
            return next(self.batches)
        except InputError as error:
            with self._pause():
                if jax.process_count() > 1:  # the other hosts are already in the next step
                    raise PassingError(str(error)) from None
                if self.log.checkpoints.newest() != self.step:
                    self._save(None)
                again = "run the same command to continue"
                raise PassingError(f"{error}\nsaved at step {self.step}: {again}") from None

    def _log(self, step: int, metrics: dict[str, jax.Array], batch: dict[str, jax.Array]) -> None:
        # Fetching the metrics waits for that step.
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        origin = None
        if self.origin is not None and not values["finite"]:  # the step has not changed the parameters
            origin = self.origin.find(gradient_point(self.state.opt_state, self.state.params), step - 1, batch)
        self.log.write(step, values, origin)

    def _save(self, scores: Scores | None) -> None:
        # Each host knows the positions of the streams that it reads, and all are saved together.
        places = {}
        if (positions := self.batches.state()) is not None:
            every = {number: x for pairs in gather_from_hosts([*positions.items()]) for number, x in pairs}
            places["places"] = [every[number] for number in sorted(every)]
        self.log.save(self.step, self.state, scores, places)


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps, or never (0), happens at this one."""
    return every > 0 and step % every == 0
