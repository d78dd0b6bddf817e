"""First losses of the configs of a study: another commit may continue the study only if they are the same."""

import itertools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from flash_lm.config.changes import apply_changes
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.sweeps.grid import raise_stopped
from flash_lm.sweeps.jobs import Job, ShouldStop
from flash_lm.training.train_loop import train

TOLERANCE = 1e-6  # nats
STEPS = 4  # from the second on, losses depend on the optimizer
_QUIET = {"train.log_every": 1, "train.eval_every": 0, "train.checkpoint_every": 0}
Losses = Mapping[str, Sequence[float]]  # of the first steps, by part and model


def first_losses(jobs: Sequence[Job], should_stop: ShouldStop) -> Losses:
    """Trains each model of each part for `STEPS` steps, with the seed and rate of its first job; returns the losses.

    Raises:
        Stopped: `should_stop` returned true.
    """
    losses: dict[str, list[float]] = {}
    for job in jobs:
        name = f"{job.about['part']} {job.about['run']}"
        if name in losses:
            continue
        losses[name] = _train_first_steps(job, should_stop)
        print(name, losses[name], flush=True)
    return losses


def _train_first_steps(job: Job, should_stop: ShouldStop) -> list[float]:
    steps = itertools.count(1)
    enough = lambda: should_stop() or next(steps) >= STEPS
    with tempfile.TemporaryDirectory() as folder:
        train(apply_changes(job.config, _QUIET), pathlib.Path(folder), enough)
        raise_stopped(should_stop)
        lines = read_jsonl(pathlib.Path(folder) / "metrics.jsonl")
    return [line["loss"] for line in lines if line["split"] == "train"][:STEPS]


def differences(one: Losses, other: Losses) -> list[str]:
    """Returns a sentence per model whose losses differ by more than `TOLERANCE`."""
    return [
        f"{name}: first losses {list(one[name])} and {list(other[name])} differ by more than {TOLERANCE:g} nats"
        for name in one.keys() & other
        if not all(abs(a - b) <= TOLERANCE for a, b in zip(one[name], other[name], strict=True))
    ]
