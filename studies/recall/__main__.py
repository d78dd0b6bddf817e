"""Recall against state: trains the models of a config, scores each, and draws what they recall.

    python -m studies.recall --config=studies/recall/configs/mqar_as_measured.py --runs=runs/mqar \
        --out=studies/recall/results/mqar

Each model is trained at each rate with the first seed, and at up to MORE_RATES further ones while its best is the
lowest or the highest; the rate with the best accuracy on the validation split gets the other seeds. Every run is scored
on the test split, by parts, and its line is added to OUT/runs.jsonl before the next run begins; run again, it goes on
where it stopped. At the end each model's decode step is timed, models taking turns. OUT gets table.md and recall.png
(accuracy against the bytes of the decode state, and against its time for a token).

Small models leave most of a machine idle. With --part=1/2 and --part=2/2 two processes, on a core each, train half of
the models each, into the same OUT; the same command without --part then makes times, table and picture.
"""

import argparse

from benchmarks.lib.timing import ROUNDS
from flash_lm.cli.load import load_module
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.errors import InputError
from flash_lm.report.figure import can_draw
from flash_lm.runs.jsonl import read_jsonl, read_lines, write_jsonl
from flash_lm.training.interrupt import stop_on_signal
from studies.recall.report import plot_recall, recall_table, summary
from studies.recall.run import models_of, recall_study, time_decoding


def main(argv: list[str]) -> None:
    """Trains and scores what is missing, times decoding, and writes table.md, summary.jsonl and recall.png."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--config", required=True, help="a file of studies/recall/configs/ that has MODELS, WIDTHS and RATES"
    )
    parser.add_argument("--runs", required=True, type=local_path, help="folder for runs in progress")
    parser.add_argument("--out", required=True, type=local_path, help="folder for the results")
    parser.add_argument("--part", type=_part, default=(1, 1), help="I/N: only train each N-th model, from the I-th on")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="turns of each model, when decoding is timed")
    arguments = parser.parse_args(argv)
    module, out = load_module(arguments.config), arguments.out
    if not hasattr(module, "MODELS"):
        raise InputError(
            f"{arguments.config} names no models: give a file like studies/recall/configs/mqar_as_measured.py"
        )
    out.mkdir(parents=True, exist_ok=True)
    models = models_of(module.get_config(), module.MODELS, module.WIDTHS)
    first, parts = arguments.part
    with stop_on_signal() as should_stop:
        own = models[first - 1 :: parts]
        seeds, file, beyond = module.MORE_SEEDS, out / "runs.jsonl", getattr(module, "MORE_RATES", 0)
        recall_study(own, module.RATES, seeds, arguments.runs, file, should_stop, beyond)
    if parts > 1:
        print(f"part {first} of {parts} is trained: when all are, run the same command without --part")
        return
    times = read_lines(out / "times.jsonl")
    if [(line["model"], line["width"]) for line in times] != [(model.name, model.width) for model in models]:
        write_jsonl(out / "times.jsonl", time_decoding(models, arguments.rounds))
    lines = summary(read_jsonl(out / "runs.jsonl"), read_jsonl(out / "times.jsonl"))
    write_jsonl(out / "summary.jsonl", lines)
    text = recall_table(lines)
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_recall(lines, out / "recall.png")
    print(text)


def _part(text: str) -> tuple[int, int]:
    first, _, parts = text.partition("/")
    if not (first.isdigit() and parts.isdigit() and 1 <= int(first) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: give one like 1/2")
    return int(first), int(parts)


if __name__ == "__main__":
    run(main)
