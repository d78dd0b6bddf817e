"""Recall against state: trains the models of a config of configs/recall/, scores each, and draws what they recall.

    python scripts/recall.py --config=configs/recall/mqar.py --runs=runs/mqar --out=results/recall/mqar

Each model is trained at each rate with the first seed; the rate with the best accuracy on the validation split gets the
other seeds. Every run is scored on the test split, by parts, and its line is added to OUT/runs.jsonl before the next
run begins; run again, it goes on where it stopped. At the end each model's decode step is timed, models taking turns.
OUT gets table.md and recall.png (accuracy against the bytes of the decode state, and against its time for a token).
"""

import argparse
import itertools
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from flash_lm.analysis.figure import can_draw
from flash_lm.analysis.recall import best, plot_recall, recall_table, summary
from flash_lm.analysis.results import validation_curve
from flash_lm.analysis.rounds import ROUNDS, Cell, take_turns
from flash_lm.command import load_module, positive, run, variant
from flash_lm.config import parse
from flash_lm.errors import RunError
from flash_lm.inference.bare_decoding import BareDecoding
from flash_lm.inference.scoring import evaluate
from flash_lm.jsonl import Line, append_jsonl, read_jsonl, write_jsonl
from flash_lm.models.facts import facts
from flash_lm.provenance import provenance
from flash_lm.study import changed
from flash_lm.training.interrupt import stop_on_signal
from flash_lm.training.loop import train

_TOKENS, _ROWS = 8, 16  # of a turn of decoding


class Model(NamedTuple):
    """A model of the study: its name, width and family, and the config of its first run."""

    name: str
    width: int
    family: str
    config: Any

    def at(self, rate: float, seed: int) -> dict[str, Any]:
        """What identifies a run in the file of runs."""
        return {"model": self.name, "width": self.width, "rate": rate, "seed": seed}


def models_of(module: Any) -> list[Model]:
    """The models of a config file, at all widths."""
    found = []
    for width, name in itertools.product(module.WIDTHS, module.MODELS):
        config: Any
        family, config = variant(changed(module.get_config(), {"model.model_dim": width}), name)
        config.model.family = family
        found.append(Model(name, width, family, config))
    return found


def one_run(model: Model, rate: float, seed: int, runs: pathlib.Path, should_stop: Callable[[], bool]) -> Line:
    """Trains and scores one run; returns its line. What is on disk is removed: the line has all that is reported.

    Raises:
        RunError: the loss became non-finite.
        KeyboardInterrupt: it was asked to stop; the run can go on.
    """
    config = changed(model.config, {"train.learning_rate": rate, "seed": seed})
    folder = runs / f"{model.name}_{model.width}_{rate:g}_{seed}"
    train(config, folder, should_stop)
    if should_stop():
        raise KeyboardInterrupt
    parts = evaluate(folder, "test", slices="parts")
    curve = validation_curve(folder)
    length = parse(config).data.length
    about = facts(model.family, config.model, (length,), ())
    shutil.rmtree(folder)
    targets = sum(part["tokens"] for part in parts)
    return {
        **model.at(rate, seed),
        "validation_accuracy": max(line["accuracy"] for line in curve),
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


def study(module: Any, runs: pathlib.Path, file: pathlib.Path, should_stop: Callable[[], bool]) -> None:
    """All runs of a config file; those with a line in the file are not made again."""
    lines = read_jsonl(file) if file.exists() else []

    def add(model: Model, rate: float, seed: int) -> None:
        at = model.at(rate, seed)
        if any(at.items() <= line.items() for line in lines):
            return
        print(", ".join(f"{key} {value}" for key, value in at.items()), flush=True)
        try:
            line = one_run(model, rate, seed, runs, should_stop)
        except RunError as error:
            line = at | {"failed": str(error)}
        append_jsonl(file, [line])
        lines.append(line)

    for model in models_of(module):
        for rate in module.RATES:
            add(model, rate, 0)
        first = [line for line in lines if (line["model"], line["width"], line["seed"]) == (*model[:2], 0)]
        for seed in module.MORE_SEEDS:
            add(model, best(first)["rate"], seed)


def time_decoding(module: Any, rounds: int) -> list[Line]:
    """Milliseconds a token of each model, models taking turns."""
    cells, lines = [], []
    for model in models_of(module):
        length, config = parse(model.config).data.length, model.config
        config.model.vocab_size = config.data.mqar.words
        decoding = BareDecoding(config, model.family, length, model.name)
        cells.append(Cell.compiled(f"{model.name} {model.width}", decoding.stepper(_ROWS, length, _TOKENS)))
        lines.append({"model": model.name, "width": model.width, "batch": _ROWS, "context": length})
    take_turns(cells, rounds, lambda text: print(text, flush=True))
    for line, cell in zip(lines, cells, strict=True):
        line |= {"ms_a_token": cell.median_ms / _TOKENS, "iqr_ms": cell.iqr_ms / _TOKENS, "turns": len(cell.times_ms)}
    about = provenance(jax.devices()[0].device_kind)
    return [line | about for line in lines]


def main(argv: list[str]) -> None:
    """Trains and scores what is missing, times decoding, and writes table.md, summary.jsonl and recall.png."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", required=True, help="a file of configs/recall/ that has MODELS, WIDTHS and RATES")
    parser.add_argument("--runs", required=True, type=pathlib.Path, help="folder for runs in progress")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the results")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="turns of each model, when decoding is timed")
    arguments = parser.parse_args(argv)
    module, out = load_module(arguments.config), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with stop_on_signal() as should_stop:
        try:
            study(module, arguments.runs, out / "runs.jsonl", should_stop)
        except KeyboardInterrupt:
            print("stopped: run the same command again to continue")
            return
    if not (out / "times.jsonl").exists():
        write_jsonl(out / "times.jsonl", time_decoding(module, arguments.rounds))
    lines = summary(read_jsonl(out / "runs.jsonl"), read_jsonl(out / "times.jsonl"))
    write_jsonl(out / "summary.jsonl", lines)
    text = recall_table(lines)
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_recall(lines, out / "recall.png")
    print(text)


if __name__ == "__main__":
    run(main)
