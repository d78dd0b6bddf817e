"""Associative recall (MQAR) at lower rates and ten times the steps of the first recall study.

A model's rate is chosen by the median of three seeds, so that one lucky seed does not choose it.
"""

import itertools
import pathlib
import statistics
from collections.abc import Sequence

from flash_lm.config.changes import apply_changes
from flash_lm.runs.jsonl import Line, group_lines
from flash_lm.runs.run_folder import run_hash
from flash_lm.sweeps.jobs import Job, ShouldStop
from flash_lm.sweeps.recall import Model, list_models, run_model
from studies.recall.configs import mqar_as_measured as measured

PART = "mqar"
MODELS = ("flash+short_convolution=3", "gated_deltanet")
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = (0, 1, 2)
_WIDTH = 32
_STEPS = 6000
_TODAY = {"model.residual_init": None, "model.scale_init": "normal", "model.divides": None}  # as by default
_STEP_S = {"flash": 0.2, "gated_deltanet": 0.45}  # seconds per step on one core while the other is busy


def jobs() -> list[Job]:
    """Lists the jobs: each model at each rate with each seed."""
    config = apply_changes(measured.get_config(), _TODAY | {"train.steps": _STEPS, "train.checkpoint_every": 500})
    models = list_models(config, MODELS, [_WIDTH])
    return [_job(*of) for of in itertools.product(models, RATES, SEEDS)]


def _job(model: Model, rate: float, seed: int) -> Job:
    def make(folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
        return run_model(model, rate, seed, folder, should_stop)

    config = model.run_config(rate, seed)
    about = {"part": PART, "run": model.family, "seed": seed, "rate": rate}
    name = f"{PART}_{model.family}_{rate:g}_seed_{seed}"
    hours = _STEPS * _STEP_S[model.family] / 3600
    return Job(name, about, run_hash(config.to_dict()), make, hours=hours, config=config)


def family_name(model: str) -> str:
    """Returns the name of a model in its lines.

    >>> family_name("flash+short_convolution=3")
    'flash'
    """
    return model.partition("+")[0]


def lines_at_best_rate(lines: Sequence[Line], run: str) -> list[Line]:
    """Returns a model's lines at the rate with the best median validation accuracy; none until all runs are done."""
    model_lines = [line for line in lines if (line["part"], line["run"]) == (PART, run)]
    if {(line["rate"], line["seed"]) for line in model_lines} < {*itertools.product(RATES, SEEDS)}:
        return []
    median = lambda of_rate: statistics.median(line.get("validation_accuracy", 0.0) for line in of_rate)
    return max(group_lines(model_lines, "rate").values(), key=median)
