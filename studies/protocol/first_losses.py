"""The first losses of the configs of a study: another commit may continue it if they are the same."""

import itertools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from flash_lm.runs.jsonl import read_jsonl
from flash_lm.sweeps.grid import apply_changes, raise_stopped
from flash_lm.training.train_loop import train
from studies.protocol.jobs import Job, ShouldStop

MOST_APART = 1e-6  # nats
STEPS = 4  # from the second on, losses depend on the optimizer
_QUIET = {"train.log_every": 1, "train.eval_every": 0, "train.checkpoint_every": 0}
Losses = Mapping[str, Sequence[float]]  # of the first steps, by part and model


def first_losses(jobs: Sequence[Job], should_stop: ShouldStop) -> Losses:
    """The losses of the first steps of each model of each part, at the seed and the rate of its first job.

    Raises:
        Stopped: it was asked to stop.
    """
    found: dict[str, list[float]] = {}
    for job in jobs:
        name = f"{job.about['part']} {job.about['run']}"
        if name in found:
            continue
        found[name] = _of(job, should_stop)
        print(name, found[name], flush=True)
    return found


def _of(job: Job, should_stop: ShouldStop) -> list[float]:
    steps = itertools.count(1)
    enough = lambda: should_stop() or next(steps) >= STEPS
    with tempfile.TemporaryDirectory() as folder:
        train(apply_changes(job.config, _QUIET), pathlib.Path(folder), enough)
        raise_stopped(should_stop)
        lines = read_jsonl(pathlib.Path(folder) / "metrics.jsonl")
    return [line["loss"] for line in lines if line["split"] == "train"][:STEPS]


def differences(one: Losses, other: Losses) -> list[str]:
    """A sentence for each model whose losses are farther apart than `MOST_APART`."""
    return [
        f"{name}: first losses {list(one[name])} and {list(other[name])} differ by more than {MOST_APART:g} nats"
        for name in one.keys() & other
        if not all(abs(a - b) <= MOST_APART for a, b in zip(one[name], other[name], strict=True))
    ]
