"""What a run counts, logs, scores and saves; the loops of one run and of several at once share it."""

import math
from collections.abc import Callable
from typing import Any

import jax

from flash_lm.data.splits import split_sizes
from flash_lm.data.tokenising_progress import in_time
from flash_lm.ops.implementations import Implementations
from flash_lm.runs.provenance import merge_provenance, provenance
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.clock import Clock
from flash_lm.training.device import peak_memory
from flash_lm.training.metrics import MetricsWriter
from flash_lm.training.microbatches import record
from flash_lm.training.nonfinite import NonfiniteSteps
from flash_lm.training.plan import Plan
from flash_lm.training.resume import Start
from flash_lm.training.rounding import rounding_warnings
from flash_lm.training.spikes import Spikes
from flash_lm.training.step_size import size_line
from flash_lm.training.train_state import Params, TrainState

Scores = dict[str, Any]


class RunLog:
    """The counters, metrics, scores and checkpoints of one run; the loop has its state.

    Attributes:
        clock: the time of training.
        checkpoints: the run's checkpoints.
        writer: the run's metrics, and its messages.
        first_step_s: time from the start of the process to the end of its first step; None: unknown, or logged.
        reached: the accuracy that ended training, see train.stop_accuracy.
    """

    def __init__(
        self,
        start: Start,
        validate: Callable[[Params], Scores],
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        implementations: Implementations,
        vmapped_runs: int = 1,
        plan: Plan | None = None,
        sample: Callable[[Params], str] | None = None,
    ):
        """Continues the counters of the start.

        Args:
            start: the start of the run.
            validate: from `make_validation`.
            checkpoints: the run's checkpoints.
            writer: the run's metrics.
            implementations: those of the compiled step.
            vmapped_runs: number of runs that are trained by the same program.
            plan: what a step takes; None: unknown.
            sample: continues train.sample_prompt; None: there is none.
        """
        # Constant during the run.
        facts, self._start, self._config = start.facts, start, start.experiment.config
        self._validate, self.checkpoints, self.writer = validate, checkpoints, writer
        self._implementations, self._plan, self._sample = implementations, plan, sample
        now = provenance(jax.devices()[0].device_kind) | implementations.line()
        self._code = merge_provenance(facts.get("code", {}), now)
        # The times of a program that trains several runs are those of all of them; a line that has them says so.
        self._together = {"vmapped_runs": vmapped_runs} if vmapped_runs > 1 else {}
        self._most_together = max(vmapped_runs, facts.get("vmapped_runs", 1))

        # Saved in checkpoints.
        self.clock = Clock(facts.get("train_seconds", 0.0))
        self._nonfinite = NonfiniteSteps(start.experiment, facts.get("skipped_steps", 0))
        self._spikes = Spikes(facts.get("loss_spikes", 0), facts.get("recent_losses", ()))
        self.reached: float | None = None

        # Not logged yet: the times since the last line.
        self._logged_step, self._logged_seconds = int(start.state.step), self.clock.seconds
        self.first_step_s: float | None = None

    def announce(self, state: TrainState) -> None:
        """Prints the model, the corpus, the start and warnings before the first step."""
        model, data = self._config.model, self._config.data
        experiment, devices = self._start.experiment, jax.devices()
        corpus, count = experiment.corpus, experiment.model.parameter_count()
        self.writer.say(
            f"{model.label}: {count:,} parameters, {data.batch_size} x {data.length} tokens per step on {len(devices)} "
            f"{devices[0].platform} device(s); corpus {corpus.name} {corpus.fingerprint[:12]}, step {state.step} of "
            f"{self._config.train.steps}"
        )
        self.writer.say(split_sizes(corpus))
        if self._start.message:
            self.writer.say(self._start.message)
        for part, sentences in self._implementations.items():
            self.writer.say(f"{part}: {' and '.join(sentences)}")
        if self._plan:
            self.writer.say(size_line(self._plan))
        for warning in rounding_warnings(self._config, state):
            self.writer.say(warning)

    def write(self, step: int, values: dict[str, float], origin: str | None = None) -> None:
        """Logs a step: a skipped one as a message, every `log_every`-th as a line of metrics.

        Args:
            step: number of the step.
            values: its metrics.
            origin: description of where the first non-finite number appeared; None: unknown.

        Raises:
            NonfiniteError: the run must end.
        """
        if not values.pop("finite"):
            carries = self._config.train.carry_state
            advice = (
                "its carried state is reset" if carries else "use --debug_nonfinite to find the layer where it begins"
            )
            self.writer.say(self._nonfinite.record_skipped(step, values, origin or advice))
            return

        # The metrics, with the times of the steps since the last line.
        self._spikes.update(values["loss"])
        if step % self._config.train.log_every == 0:
            seconds = self.clock.seconds
            seconds_per_step = (seconds - self._logged_seconds) / (step - self._logged_step)
            self._logged_step, self._logged_seconds = step, seconds
            values |= {
                "train_seconds": seconds,
                "step_ms": 1000 * seconds_per_step,
                "skipped_steps": self._nonfinite.skipped,
            }
            values["loss_spikes"] = self._spikes.count
            values["tokens"] = step * self._config.data.tokens_per_batch
            values |= self._speed(seconds_per_step)
            if self.first_step_s is not None:
                values["first_step_s"], self.first_step_s = self.first_step_s, None
            self.writer.write(step, "train", values | self._together)
            self.writer.progress(step, self._progress(step, values))
        self.writer.progress(step)

    def _speed(self, seconds_per_step: float) -> Scores:
        """Tokens per second, the share of the devices' peak rate (model FLOPs utilisation), and the memory in use."""
        values = {"tokens_per_second": self._config.data.tokens_per_batch / seconds_per_step}
        if self._plan and self._plan.peak:
            values["mfu"] = self._plan.step_flops / (seconds_per_step * self._plan.peak * self._plan.target.count)
        memory = peak_memory()
        return values | ({"memory_bytes": memory} if memory else {})

    def _progress(self, step: int, values: Scores) -> dict[str, str]:
        """What the progress shows of a logged step."""
        left = (self._config.train.steps - step) * values["step_ms"] / 1000
        shown = {"loss": f"{values['loss']:.4g}", "tokens/s": f"{values['tokens_per_second']:,.0f}"}
        shown |= {"MFU": f"{values['mfu']:.0%}"} if "mfu" in values else {}
        return shown | {"left": in_time(left)}

    def evaluate(self, step: int, state: TrainState) -> Scores:
        """Scores the validation split, logs the scores, and checks whether the target accuracy is reached.

        Raises:
            NonfiniteError: the last step was skipped, and the loss is not finite either.
        """
        # The parameters, and their average if there is one.
        scores = self._validate(state.params)
        if state.ema is not None:
            averaged = self._validate(state.ema)
            scores |= {f"ema_{name}": averaged[name] for name in ("loss", "perplexity", "accuracy") if name in averaged}
        self.writer.write(step, "validation", scores | {"train_seconds": self.clock.seconds} | self._together)

        if self._sample:
            text = self._sample(state.params)
            prompt = self._config.train.sample_prompt
            self.writer.write(step, "sample", {"prompt": prompt, "text": text})
            self.writer.say(f"step {step}: {prompt}{text}")
        self.writer.upload()

        # The message, and `train.stop_accuracy`.
        loss, accuracy = scores["loss"], scores.get("accuracy", math.nan)
        details = "" if math.isnan(accuracy) else f", accuracy {accuracy:.1%}"
        if (share := scores["split_share"]) < 1:
            details += f", on {share:.1%} of the split"
        self.writer.say(f"step {step}: validation loss {loss:.4f}, perplexity {scores['perplexity']:.2f}{details}")
        goal = self._config.train.stop_accuracy
        self.reached = accuracy if goal and accuracy >= goal else None
        if step == self._config.train.steps:
            self._nonfinite.check_end(loss)
        return scores

    def save(self, step: int, state: TrainState, scores: Scores | None, more: dict[str, Any] | None = None) -> None:
        """Saves a checkpoint.

        Args:
            step: number of steps done.
            state: state to save.
            scores: those of an evaluation at this step, so that it can be the best.
            more: facts that only the loop knows.
        """
        # The log first: a checkpoint must not be newer than its log.
        self.writer.flush()
        # Metadata that a resume needs: identity of the corpus, clock, counters, code.
        corpus = self._start.experiment.corpus
        facts = {
            "corpus": corpus.fingerprint,
            "tokenizer": corpus.tokenizer.fingerprint,
            "train_seconds": self.clock.seconds,
            "skipped_steps": self._nonfinite.skipped,
            "loss_spikes": self._spikes.count,
            "recent_losses": self._spikes.recent,
            "code": self._code,
            "microbatches": record(self._start.experiment),
            **(more or {}),
        }
        if self.reached is not None:
            facts["reached"] = self.reached
        if self._most_together > 1:
            facts["vmapped_runs"] = self._most_together
        facts |= {name: self._start.facts[name] for name in ("parent", "teacher") if name in self._start.facts}
        # Only finite scores compete for the best checkpoint.
        is_finite = scores is not None and all(map(math.isfinite, scores.values()))
        self.checkpoints.save(step, state, facts, scores if is_finite else None)

    def say_end(self, step: int) -> bool:
        """Says why training ends here; returns whether the run has come to its end, or else was stopped."""
        if self.reached is not None:
            self.writer.say(f"step {step}: train.stop_accuracy={self._config.train.stop_accuracy} is reached")
        done = step == self._config.train.steps or self.reached is not None
        if not done:
            self.checkpoints.wait()
            self.writer.say(f"stopped and saved at step {step}: run the same command to continue")
        return done
