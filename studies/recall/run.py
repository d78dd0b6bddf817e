"""Runs of the recall study: models on associative recall at several rates and seeds, and their decode times."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.config.overrides import variant
from flash_lm.inference.scoring import evaluate
from flash_lm.models.facts import facts
from flash_lm.report.results import validation_curve
from flash_lm.runs.jsonl import Line
from flash_lm.runs.provenance import provenance
from flash_lm.sweeps.grid import train_to_end
from flash_lm.sweeps.jobs import Job, ShouldStop, read_job_lines
from flash_lm.sweeps.rates import rate_and_seed_jobs
from flash_lm.timing.bare_decoding import BareDecoding
from flash_lm.timing.turns import Cell, take_turns
from studies.recall.report import selection_loss

_TOKENS, _ROWS = 8, 16  # tokens per turn of decoding, and sequences of the batch
_FACTOR = 3.0  # from the best rate to the next one beyond it


class Model(NamedTuple):
    """A model of the study: its name, width and family, and the config of its first run."""

    name: str
    width: int
    family: str
    config: Any

    def about(self, rate: float, seed: int) -> dict[str, Any]:
        """Returns the keys that identify the line of a run."""
        return {"model": self.name, "width": self.width, "rate": rate, "seed": seed}

    def run_config(self, rate: float, seed: int) -> Any:
        """Returns the config of a run."""
        return apply_changes(self.config, {"train.learning_rate": rate, "seed": seed})


def list_models(config: ConfigDict, names: Sequence[str], widths: Sequence[int]) -> list[Model]:
    """Lists models at several widths.

    Args:
        config: base config of all models.
        names: a family each, perhaps with keys of config.model, such as flash+short_convolution=3.
        widths: values of model.model_dim.
    """
    models = []
    for width, name in itertools.product(widths, names):
        model_config: Any
        family, model_config = variant(apply_changes(config, {"model.model_dim": width}), name)
        model_config.model.update(family=family, vocab_size=model_config.data.mqar.words)
        models.append(Model(name, width, family, model_config))
    return models


def run_model(model: Model, rate: float, seed: int, folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
    """Trains and scores a model with a rate and a seed; returns its line.

    Raises:
        NonfiniteError: the loss became non-finite.
        Stopped: `should_stop` returned true; the run can be resumed.
    """
    config = model.run_config(rate, seed)
    train_to_end(config, folder, should_stop)
    # Accuracy by part, and over all targets; the state is that of a full sequence.
    parts = evaluate(folder, "test", slices=("parts",))
    curve = validation_curve(folder)
    length = parse(config).data.length
    about = facts(model.family, config.model, (length,), ())
    targets = sum(part["tokens"] for part in parts)
    line = {
        **model.about(rate, seed),
        "validation_accuracy": curve[-1]["accuracy"],  # of the parameters that are scored on the test split
        "accuracy": sum(part["accuracy"] * part["tokens"] for part in parts) / targets,
        "by_part": {part["slice"]: part["accuracy"] for part in parts},
        "targets": targets,
        "step": parts[0]["step"],
        "state_bytes": about.state_bytes[length],
        "parameters": about.parameters,
        "train_seconds": parts[0]["train_seconds"],
        "config_hash": parts[0]["config_hash"],
        **provenance(jax.devices()[0].device_kind),
    }
    return [line]


def list_jobs(
    models: Sequence[Model], rates: Sequence[float], more_seeds: Sequence[int], further: int, out: pathlib.Path
) -> list[Job]:
    """Lists the jobs: each model at each rate with seed 0, and more seeds at its best rate by validation accuracy.

    Args:
        models: from `list_models`.
        rates: learning rates.
        more_seeds: seeds besides 0.
        further: most further rates of each model, see `rates_to_try`.
        out: folder of the lines.
    """
    return rate_and_seed_jobs(
        models, rates, more_seeds, further, read_job_lines(out), selection_loss, run_model, _FACTOR
    )


def time_decoding(models: Sequence[Model], rounds: int) -> list[Line]:
    """Times decoding of each model in ms per token; models take turns."""
    cells, lines = [], []
    for model in models:
        length = parse(model.config).data.length
        decoding = BareDecoding(model.config, model.family, length, model.name)
        cells.append(Cell.compile(f"{model.name} {model.width}", decoding.make_decode_turn(_ROWS, length, _TOKENS)))
        lines.append({"model": model.name, "width": model.width, "batch": _ROWS, "context": length})
    take_turns(cells, rounds, lambda text: print(text, flush=True))
    for line, cell in zip(lines, cells, strict=True):
        line |= {"ms_a_token": cell.median_ms / _TOKENS, "iqr_ms": cell.iqr_ms / _TOKENS, "turns": len(cell.times_ms)}
    about = provenance(jax.devices()[0].device_kind)
    return [line | about for line in lines]
