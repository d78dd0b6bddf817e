"""Runs of the seq2seq study: models that read the source from the left, as a prefix, or with an encoder."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from flash_lm.config.changes import apply_changes
from flash_lm.inference.scoring import evaluate
from flash_lm.report.results import validation_curve
from flash_lm.runs.jsonl import Line
from flash_lm.runs.provenance import provenance
from flash_lm.sweeps.grid import train_to_end
from flash_lm.sweeps.jobs import ShouldStop


class Model(NamedTuple):
    """A model of the study: its name, and the config of its first run."""

    name: str
    config: Any

    def about(self, rate: float, seed: int) -> dict[str, Any]:
        """Returns the keys that identify the line of a run."""
        return {"model": self.name, "rate": rate, "seed": seed}

    def run_config(self, rate: float, seed: int) -> Any:
        """Returns the config of a run."""
        return apply_changes(self.config, {"train.learning_rate": rate, "seed": seed})


def list_models(config: Any, keys: Mapping[str, Mapping[str, Any]]) -> list[Model]:
    """Lists the models of a study.

    Args:
        config: base config of all models.
        keys: config keys of each model, by name.
    """
    return [Model(name, apply_changes(config, changes)) for name, changes in keys.items()]


def run_model(model: Model, rate: float, seed: int, folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    """Trains and scores a model with a rate and a seed; returns its line.

    Raises:
        NonfiniteError: the loss became non-finite.
        Stopped: `should_stop` returned true; the run can be resumed.
    """
    train_to_end(model.run_config(rate, seed), folder, should_stop)
    (scores,) = evaluate(folder, "test", [])
    curve = validation_curve(folder)
    line = {
        **model.about(rate, seed),
        "task": model.config.task,
        "validation_loss": curve[-1]["loss"],  # of the parameters that are scored on the test split
        **{key: scores[key] for key in ("perplexity", "accuracy", "tokens", "step", "parameters", "train_seconds")},
        "config_hash": scores["config_hash"],
        **provenance(jax.devices()[0].device_kind),
    }
    return [line]
