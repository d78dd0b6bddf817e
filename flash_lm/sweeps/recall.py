"""Compares models on recall: runs at several rates and seeds, their summary, and their decode times."""

import itertools
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.config.overrides import variant
from flash_lm.config.registry import CORPORA, FAMILIES
from flash_lm.data.expected import expected_corpus
from flash_lm.errors import InputError, one_of_names
from flash_lm.families.family import families_with_form
from flash_lm.inference.scoring import evaluate
from flash_lm.models.facts import facts
from flash_lm.runs.jsonl import Line, read_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.sweeps.grid import find_problem, train_to_end
from flash_lm.sweeps.jobs import Job, ShouldStop, read_job_lines
from flash_lm.sweeps.rates import lines_at_best_rate, rate_and_seed_jobs
from flash_lm.timing.bare_decoding import BareDecoding
from flash_lm.timing.turns import Cell, take_turns
from flash_lm.training.resolve import choose_vocab_size

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


def name_models(words: Sequence[str], config: Any) -> list[str]:
    """The models that words name: families, perhaps with keys, and `all` for each that can do this task.

    Args:
        words: such as flash, based+short_convolution=3, or all.
        config: the config of all models.

    Raises:
        InputError: a family is unknown, a model is wrong, or the corpus has no examples.
    """
    if not CORPORA[config.data.corpus].examples:
        raise InputError(f"data.corpus={config.data.corpus} has no answers to score: use a config such as recall/mqar")
    names, problems = [], []
    for word in words:
        families = families_with_form(causal=True) if word == "all" else [word]
        for name in families:
            if expected := one_of_names(name.partition("+")[0], FAMILIES):
                problems.append(f"--models: {name} must be {expected}, or all")
            elif problem := _problem(config, name):
                if word != "all":
                    problems.append(f"--models: {name}: {problem}")
                else:
                    print(f"{name} is left out: {problem}")
            else:
                names.append(name)
    if problems:
        raise InputError.of(problems)
    return list(dict.fromkeys(names))


def _problem(config: ConfigDict, name: str) -> str | None:
    """What is wrong with a model of this config, if anything."""
    try:
        family, changed = variant(config, name)
    except InputError as error:
        return "; ".join(str(error).splitlines())
    return find_problem(apply_changes(changed, {"model.family": family}))


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
        model_config.model.family = family
        parsed = parse(model_config)
        model_config.model.vocab_size = choose_vocab_size(parsed, expected_corpus(parsed.data))
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
    curve = [line for line in read_jsonl(folder / "metrics.jsonl") if line["split"] == "validation"]
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
        **({"state_bytes": about.state_bytes[length]} if about.state_bytes else {}),
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


def selection_loss(line: Line) -> float:
    """Returns the score that chooses a rate: the negative validation accuracy; a failed run is the worst."""
    return -line.get("validation_accuracy", -1.0)


def summarize(runs: list[Line], times: list[Line]) -> list[Line]:
    """Returns a line per model and width: accuracy over the seeds at its best rate, its state, and its time per token.

    Seeds whose loss did not stay finite are counted, and have no accuracy.
    """
    ms = {(line["model"], line["width"]): line["ms_a_token"] for line in times}
    summaries = []
    # A line per model and width, at its best rate.
    for model, width in dict.fromkeys((line["model"], line["width"]) for line in runs):
        chosen_lines = lines_at_best_rate(runs, {"model": model, "width": width}, selection_loss)
        finite, rate = [line for line in chosen_lines if "failed" not in line], chosen_lines[0]["rate"]
        failed = len(chosen_lines) - len(finite)
        if not finite:
            summaries.append({"model": model, "width": width, "rate": rate, "seeds": 0, "failed": failed})
            continue
        accuracies = [line["accuracy"] for line in finite]
        parts = {part: statistics.median(line["by_part"][part] for line in finite) for part in finite[0]["by_part"]}
        summaries.append(
            {
                "model": model,
                "width": width,
                "rate": rate,
                "seeds": len(finite),
                "failed": failed,
                "accuracy": statistics.median(accuracies),
                "lowest": min(accuracies),
                "highest": max(accuracies),
                "by_part": parts,
                "step": statistics.median(line["step"] for line in finite),
                **{key: finite[0][key] for key in ("state_bytes", "parameters", "device") if key in finite[0]},
                **({"ms_a_token": ms[model, width]} if (model, width) in ms else {}),
            }
        )
    return summaries


def time_decoding(models: Sequence[Model], rounds: int) -> list[Line]:
    """Times decoding of each model in ms per token; models take turns."""
    cells, lines = [], []
    for model in models:
        length = parse(model.config).data.length
        if not facts(model.family, model.config.model, (length,), ()).state_bytes:
            continue  # it does not decode
        decoding = BareDecoding(model.config, model.family, length, model.name)
        cells.append(Cell.compile(f"{model.name} {model.width}", decoding.make_decode_turn(_ROWS, length, _TOKENS)))
        lines.append({"model": model.name, "width": model.width, "batch": _ROWS, "context": length})
    take_turns(cells, rounds, lambda text: print(text, flush=True))
    for line, cell in zip(lines, cells, strict=True):
        line |= {"ms_a_token": cell.median_ms / _TOKENS, "iqr_ms": cell.iqr_ms / _TOKENS, "turns": len(cell.times_ms)}
    about = provenance(jax.devices()[0].device_kind)
    return [line | about for line in lines]
