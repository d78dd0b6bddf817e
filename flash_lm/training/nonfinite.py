"""Handles steps with a non-finite loss or gradient: skips and counts them, or ends the run; and finds the origin."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flash_lm.config.registry import TASKS
from flash_lm.errors import NonfiniteError
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.training.setup import Experiment
from flash_lm.training.train_state import Params
from flash_lm.training.train_step import make_gradients, microbatches

MOST_IN_A_ROW = 100  # steps to skip; more are not an accident
SHARE_IN_A_ROW = 0.1  # share of a run's steps, so that the limit also ends a short one


class NonfiniteSteps:
    """Counts skipped steps, and ends the run if `train.on_nonfinite` says so or too many follow each other.

    Attributes:
        skipped: number of skipped steps since the run began.
    """

    def __init__(self, experiment: Experiment, skipped: int):
        """Continues counting from `skipped`."""
        self._experiment, self.skipped = experiment, skipped
        self._in_a_row, self._last = 0, -1
        self._most = min(MOST_IN_A_ROW, max(1, int(SHARE_IN_A_ROW * experiment.config.train.steps)))

    def record_skipped(self, step: int, values: dict[str, float], origin: str) -> str:
        """Counts a skipped step, and returns the line to log.

        Args:
            step: number of the step.
            values: its metrics.
            origin: description of where the first non-finite number appeared, or how to find out.

        Raises:
            NonfiniteError: the run must end.
        """
        # The report names the sequences, so that their text can be looked at.
        config = self._experiment.config
        first = (step - 1) * config.data.batch_size
        report = (
            f"step {step} (rows {first} to {first + config.data.batch_size - 1} in the order of training): loss "
            f"{values['loss']}, gradient norm {values['grad_norm']}; {origin}"
        )
        if config.train.on_nonfinite == "stop":
            raise NonfiniteError(
                f"{report}\nthis step has not been saved: set --config.train.on_nonfinite=skip, or lower "
                f"--config.train.learning_rate, and start in another --workdir"
            )

        # A single skipped step is an accident; many in a row are a diverged run.
        self._in_a_row = self._in_a_row + 1 if step == self._last + 1 else 1
        self._last, self.skipped = step, self.skipped + 1
        if self._in_a_row > self._most:
            raise self._make_error(report)
        return f"{report}; step skipped ({self.skipped - 1} skipped earlier)"

    def check_end(self, loss: float) -> None:
        """Checks that a run does not end with a broken model, which no further step could train.

        Args:
            loss: validation loss after the last step.

        Raises:
            NonfiniteError: the last step was skipped, and the loss is not finite either.
        """
        last = self._experiment.config.train.steps
        if self._last == last and not math.isfinite(loss):
            raise self._make_error(f"step {last}: validation loss {loss}")

    def _make_error(self, report: str) -> NonfiniteError:
        """The error after too many skipped steps, in one line: earlier ones have been logged."""
        skipped = f"the last {self._in_a_row} steps were" if self._in_a_row > 1 else "the last step was"
        return NonfiniteError(
            f"{report}; {skipped} skipped: lower --config.train.learning_rate, and start in another --workdir"
        )


class Origin:
    """Finds where the first non-finite number of a step appears."""

    def __init__(self, experiment: Experiment):
        """Compiles on first use."""
        self._experiment = experiment
        self._gradients = make_gradients(
            experiment.model, experiment.config.train, experiment.config.seed, TASKS[experiment.config.task]
        )
        # Replicated on every host, so that all report the same.
        self._flags = jax.jit(self._compute, out_shardings=NamedSharding(experiment.mesh, PartitionSpec()))

    def find(self, params: Params, step: int, batch: dict[str, jax.Array]) -> str:
        """Describes the location of the first non-finite number in a sentence.

        Args:
            params: parameters before the step.
            step: number of steps done before it.
            batch: batch of the step.
        """
        # The stages of the model in order, each with a flag per sequence: whether its activations are finite.
        flags = jax.device_get(self._flags(params, step, batch))
        model = self._experiment.config.model
        stages = [("the encoder", flags["encoder"])] if "encoder" in flags else []
        stages.append(("the embedding", flags["embedding"]))
        families = itertools.cycle(model.families)
        stages += [
            (f"layer {i} of {model.num_layers} ({family})", rows)
            for i, (family, rows) in enumerate(zip(families, flags["layers"], strict=False), start=1)
        ]
        stages.append(("the last norm", flags["norm"]))

        # The first cause, in the order in which a step computes.
        if bad := _first(flags["params"]):
            return f"the parameter {bad} is not finite before the step"
        for name, rows_B in stages:
            if not rows_B.all():
                row = int(np.argmin(rows_B))
                return f"the first non-finite activation comes out of {name}, in row {row} of the batch"
        if bad := _first(flags["gradients"]):
            return f"all activations are finite, but the gradient of {bad} is not"
        return "all activations and gradients are finite, but the optimizer's update or the gradient norm is not"

    def _compute(self, params: Params, step: jax.Array, batch: dict[str, jax.Array]) -> dict[str, Any]:
        """Flags of finite parameters and gradients by leaf, and of finite activations by stage and sequence."""
        config = self._experiment.config
        rows_are_finite = lambda x_BxLxD: jnp.isfinite(x_BxLxD).all(axis=(1, 2))

        def activation_flags(part):
            microbatch, key = part
            bound = self._experiment.model.bind(params)
            return bound.activations(rows_are_finite, ModelInputs.from_batch(microbatch), key)

        count = config.train.microbatches
        flags = jax.lax.map(activation_flags, microbatches(batch, count, config.seed, step))
        # M×(B/M) or M×layers×(B/M), and sequence r of the batch is in microbatch r mod M.
        flags = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1).reshape(*x.shape[1:-1], -1), flags)
        all_finite = lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)
        _, gradients, _ = self._gradients(params, step, batch)
        return flags | {"params": all_finite(params), "gradients": all_finite(gradients)}


def _first(flags: Any) -> str | None:
    """Path of the first leaf that is false."""
    for path, flag in jax.tree_util.tree_leaves_with_path(flags):
        if not flag:
            return jax.tree_util.keystr(path, simple=True, separator=".")
    return None
