"""The training loop: start or resume, step, log, evaluate, save."""

import contextlib
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
from ml_collections import ConfigDict

from flash_lm.config.registry import TASKS
from flash_lm.data.batches import Batch
from flash_lm.data.packing import Rows
from flash_lm.data.splits import split_sizes
from flash_lm.errors import InputError, RunError
from flash_lm.ops.implementations import recorded
from flash_lm.runs.hosts import StopOfAllHosts, check_same, gather_from_hosts, is_first
from flash_lm.runs.lost_hosts import report_lost_host
from flash_lm.runs.provenance import merge_provenance, provenance
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.clock import Clock
from flash_lm.training.compiled_step import CompiledStep
from flash_lm.training.metrics import MetricsWriter
from flash_lm.training.nonfinite import NonfiniteSteps, Origin
from flash_lm.training.profile import Profile, Span, check_span
from flash_lm.training.resume import OpenRun, Start, find_start, open_run
from flash_lm.training.rounding import rounding_warnings
from flash_lm.training.schedule_free import gradient_point
from flash_lm.training.setup import Experiment, build_experiment
from flash_lm.training.sharding import batch_sharding, check_batch, shard_batch
from flash_lm.training.spikes import Spikes
from flash_lm.training.validation import make_validation


def train(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    should_stop: Callable[[], bool] = lambda: False,
    profile: Span | None = None,
    debug_nonfinite: bool = False,
    started_at: float | None = None,
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

    Returns:
        Whether the run has come to its end; otherwise it was asked to stop, and can go on.

    Raises:
        InputError: bad config, data or workdir; nothing has been written.
        RunError: the loss became non-finite, a checkpoint could not be written, or another host is gone.
    """
    started_at = time.perf_counter() if started_at is None else started_at
    with contextlib.ExitStack() as stack:
        stack.enter_context(report_lost_host())

        # Lock the run folder, read it once, and fill in open keys from its run or its parent run.
        run = stack.enter_context(open_run(pathlib.Path(workdir), config))

        # Corpus, model, optimizer, mesh, and the shapes of the train state.
        experiment = build_experiment(run.config, run.known_corpus())
        validation = experiment.evaluation_rows("validation")
        _check(experiment, run, validation, profile, debug_nonfinite)
        stack.enter_context(jax.set_mesh(experiment.mesh))

        # The start. A new run makes its folder of checkpoints only when it begins, so that a refused one leaves none.
        checkpoints = stack.enter_context(_checkpoints(run)) if run.newest is not None else None
        start = find_start(experiment, checkpoints, run)
        if (end := _why_finished(start, run)) is not None:
            if is_first():
                print(f"{workdir}: {end}")
            return True

        # From here on the folder is written to.
        corpus = experiment.corpus
        run.begin(corpus.tokenizer, corpus.labels if TASKS[experiment.config.task].labels else ())
        checkpoints = checkpoints or stack.enter_context(_checkpoints(run))
        loop = _Loop(start, validation, run.folder.path, checkpoints, started_at, debug_nonfinite)
        return loop.run(should_stop, Profile(run.folder.path / "profile", profile))


def _check(experiment: Experiment, run: OpenRun, validation: Rows, profile: Span | None, debug_nonfinite: bool) -> None:
    """Checks that need the corpus or the devices, before anything is written."""
    config, corpus = experiment.config, experiment.corpus
    check_batch(experiment.mesh, config.data.batch_size, config.train.accumulate)
    if debug_nonfinite and config.train.carry_state:
        raise InputError("--debug_nonfinite does not support train.carry_state=True: leave one of them out")
    if profile:
        check_span(profile, config.train.steps)
    # Hosts that differ in one of these would hang in their first exchange, or train on different data.
    check_same(
        config=run.resolved.record.to_dict(),
        corpus=corpus.fingerprint,
        tokenizer=corpus.tokenizer.fingerprint,
        checkpoint=run.newest,
    )
    if not any(validation[i]["loss_mask_BxL"].any() for i in range(len(validation))):
        raise InputError("no token of the validation split is a target: give more text, or raise data.masking.rate")


def _checkpoints(run: OpenRun) -> Checkpoints:
    train = run.config.train
    return Checkpoints(run.folder.path, run=run.folder, keep=train.keep, best_metric=train.best_metric)


def _why_finished(start: Start, run: OpenRun) -> str | None:
    """Why the run has nothing left to train; None: it has steps left."""
    train = start.experiment.config.train
    if int(start.state.step) == train.steps:
        return f"all {train.steps} steps are done"
    if train.stop_accuracy and run.newest is not None and start.facts.get("reached", 0.0) >= train.stop_accuracy:
        return f"train.stop_accuracy={train.stop_accuracy} was reached at step {start.state.step}"
    return None


class _Loop:
    """The train state with its counters, and the loop `run`: step, log, evaluate, save."""

    def __init__(
        self,
        start: Start,
        validation_rows: Rows,
        workdir: pathlib.Path,
        checkpoints: Checkpoints,
        started_at: float,
        debug_nonfinite: bool,
    ):
        # Constant during the run.
        experiment, facts = start.experiment, start.facts
        self.start, self.experiment, self.config, self.share = start, experiment, experiment.config, start.share
        self.sharding = batch_sharding(experiment.mesh)

        # The compiled step, and which implementations it has got.
        with recorded() as self.implementations:
            self.compiled_step = CompiledStep(experiment)

        # Saved in checkpoints.
        now = provenance(jax.devices()[0].device_kind) | self.implementations.line()
        self.code = merge_provenance(facts.get("code", {}), now)
        self.state, self.step = start.state, int(start.state.step)
        self.clock = Clock(facts.get("train_seconds", 0.0))
        self.nonfinite = NonfiniteSteps(experiment, facts.get("skipped_steps", 0))
        self.spikes = Spikes(facts.get("loss_spikes", 0), facts.get("recent_losses", ()))
        self.batches = experiment.training_batches(self.share, self.step, start.stream_position)
        self.reached: float | None = None  # the accuracy that ended training, see train.stop_accuracy

        # The functions and writers that work on the state.
        self.validate = make_validation(experiment, validation_rows)
        self.origin = Origin(experiment) if debug_nonfinite else None
        self.checkpoints = checkpoints
        self.writer = MetricsWriter(workdir, step=self.step, steps=self.config.train.steps)

        # Not logged yet: the number, metrics and batch of the last step, and the times since the last line.
        self.pending: tuple | None = None
        self.logged_step, self.logged_seconds = self.step, self.clock.seconds
        self.started_at: float | None = started_at  # None: the first step has been reported
        self.first_step_s: float | None = None  # of this process, until it is logged

    def run(self, should_stop: Callable[[], bool], profile: Profile) -> bool:
        """Trains; returns whether the run has come to its end."""
        config, stops = self.config.train, StopOfAllHosts(should_stop)
        with contextlib.closing(self.writer):
            self._announce()
            if self.start.message:  # save now: the parent may change or vanish later
                self._save(None)
                self.checkpoints.wait()
            self.clock.start()

            stopping = False
            while self.step < config.steps and not stopping and self.reached is None:
                # Train. The clock runs; everything else below pauses it, so that only steps are timed.
                if profile.is_due(self.step):
                    with self._pause():
                        profile.start()
                self._take_step()
                stopping = stops(self.step, self.clock.seconds)

                # Write a trace whose last step is done.
                last = self.step == config.steps
                if profile.is_over(self.step) or (profile.on and (last or stopping)):
                    with self._pause():
                        profile.write()
                    self.writer.say(
                        f"step {self.step}: trace written to {profile.folder}, for TensorBoard or ui.perfetto.dev"
                    )

                # Evaluate and save. A run that is asked to stop saves, but does not take the time to evaluate.
                evaluates, saves = (last or _due(self.step, n) for n in (config.eval_every, config.checkpoint_every))
                if evaluates or saves or stopping:
                    with self._pause():
                        scores = self._evaluate() if evaluates else None
                        if last and scores is not None:
                            self.nonfinite.check_end(scores["loss"])
                        if saves or stopping or self.reached is not None:
                            self._save(scores)

            # The end, or where the run was stopped.
            if self.reached is not None:
                self.writer.say(f"step {self.step}: train.stop_accuracy={config.stop_accuracy} is reached")
            done = self.step == config.steps or self.reached is not None
            if not done:
                self.checkpoints.wait()
                self.writer.say(f"stopped and saved at step {self.step}: run the same command to continue")
            return done

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
        self.first_step_s, self.started_at = time.perf_counter() - started_at, None
        self.writer.say(f"first step done {self.first_step_s:.1f} s after the start")

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Logs the pending step, waits for the device, and stops the training clock during the block."""
        self._log_pending()
        jax.block_until_ready(self.state)
        self.clock.pause()
        yield
        self.clock.start()

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
                    raise RunError(str(error)) from None
                if self.checkpoints.newest() != self.step:
                    self._save(None)
                again = "run the same command to continue"
                raise RunError(f"{error}\nsaved at step {self.step}: {again}") from None

    def _announce(self) -> None:
        """Prints the model, the corpus, the start and warnings before the first step."""
        model, data = self.config.model, self.config.data
        corpus = self.experiment.corpus
        count, devices = self.experiment.model.parameter_count(), jax.devices()
        self.writer.say(
            f"{model.label}: {count:,} parameters, {data.batch_size} x {data.length} tokens per step on {len(devices)} "
            f"{devices[0].platform} device(s); corpus {corpus.name} {corpus.fingerprint[:12]}, step {self.step} of "
            f"{self.config.train.steps}"
        )
        self.writer.say(split_sizes(corpus))
        if self.start.message:
            self.writer.say(self.start.message)
        for part, sentences in self.implementations.items():
            self.writer.say(f"{part}: {' and '.join(sentences)}")
        for warning in rounding_warnings(self.config, self.state):
            self.writer.say(warning)

    def _log(self, step: int, metrics: dict[str, jax.Array], batch: dict[str, jax.Array]) -> None:
        """Logs a step: a skipped one as a message, every `log_every`-th as a line of metrics."""
        # Fetching the metrics waits for that step.
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not values.pop("finite"):
            carries = self.config.train.carry_state
            origin = (
                "its carried state is reset" if carries else "use --debug_nonfinite to find the layer where it begins"
            )
            if self.origin is not None:  # the step has not changed the parameters
                origin = self.origin.find(gradient_point(self.state.opt_state, self.state.params), step - 1, batch)
            self.writer.say(self.nonfinite.record_skipped(step, values, origin))
            return

        # The metrics, with the times of the steps since the last line.
        self.spikes.update(values["loss"])
        if step % self.config.train.log_every == 0:
            seconds = self.clock.seconds
            seconds_per_step = (seconds - self.logged_seconds) / (step - self.logged_step)
            self.logged_step, self.logged_seconds = step, seconds
            values |= {
                "train_seconds": seconds,
                "step_ms": 1000 * seconds_per_step,
                "skipped_steps": self.nonfinite.skipped,
            }
            values["loss_spikes"] = self.spikes.count
            values["tokens_per_second"] = self.config.data.batch_size * self.config.data.length / seconds_per_step
            if self.first_step_s is not None:
                values["first_step_s"], self.first_step_s = self.first_step_s, None
            self.writer.write(step, "train", values)
            self.writer.progress(step, loss=values["loss"], tokens_per_s=values["tokens_per_second"])
        self.writer.progress(step)

    def _evaluate(self) -> dict[str, float]:
        """Scores the validation split, logs the scores, and checks whether the target accuracy is reached."""
        # The parameters, and their average if there is one.
        scores = self.validate(self.state.params)
        if self.state.ema is not None:
            averaged = self.validate(self.state.ema)
            scores |= {f"ema_{name}": averaged[name] for name in ("loss", "perplexity", "accuracy") if name in averaged}
        self.writer.write(self.step, "validation", scores | {"train_seconds": self.clock.seconds})

        # The message, and `train.stop_accuracy`.
        loss, accuracy = scores["loss"], scores.get("accuracy", math.nan)
        details = "" if math.isnan(accuracy) else f", accuracy {accuracy:.1%}"
        if (share := scores["split_share"]) < 1:
            details += f", on {share:.1%} of the split"
        self.writer.say(f"step {self.step}: validation loss {loss:.4f}, perplexity {scores['perplexity']:.2f}{details}")
        goal = self.config.train.stop_accuracy
        self.reached = accuracy if goal and accuracy >= goal else None
        return scores

    def _save(self, scores: dict[str, float] | None) -> None:
        """Saves a checkpoint; `scores` of an evaluation at this step, so that it can be the best."""
        # The log first: a checkpoint must not be newer than its log.
        self.writer.flush()
        # Metadata that a resume needs: identity of the corpus, clock, counters, code.
        facts = {
            "corpus": self.experiment.corpus.fingerprint,
            "tokenizer": self.experiment.corpus.tokenizer.fingerprint,
            "train_seconds": self.clock.seconds,
            "skipped_steps": self.nonfinite.skipped,
            "loss_spikes": self.spikes.count,
            "recent_losses": self.spikes.recent,
            "code": self.code,
        }
        if self.reached is not None:
            facts["reached"] = self.reached
        if "parent" in self.start.facts:
            facts["parent"] = self.start.facts["parent"]
        # Each group of hosts reads its own part of a stream, and all positions are saved together.
        if self.experiment.corpus.stream:
            positions = dict(gather_from_hosts([self.share.group, self.batches.state()]))
            facts["places"] = [positions[group] for group in sorted(positions)]
        # Only finite scores compete for the best checkpoint.
        is_finite = scores is not None and all(map(math.isfinite, scores.values()))
        self.checkpoints.save(self.step, self.state, facts, scores if is_finite else None)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
