"""Recall against state: trains and scores the models of a config, and plots their recall.

    python -m studies.recall --config=studies/recall/configs/mqar_as_measured.py --runs=runs/mqar \
        --out=studies/recall/results/mqar

Each model is trained at each rate with the first seed. While its best rate is the lowest or the highest, up to
MORE_RATES further rates are tried. The rate with the best accuracy on the validation split gets the other seeds. Every
run is scored on the test split, by parts, and its line is written at once. Run again, the command continues where it
stopped. At the end the decode steps are timed, and models take turns. OUT gets table.md and recall.png (accuracy
against the bytes of the decode state, and against the time per token).

Small models leave most of a machine idle. The same command, started once per core, shares the runs.
"""

import argparse

from flash_lm.cli.load import load_module
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.errors import InputError
from flash_lm.report.figure import can_draw
from flash_lm.runs.jsonl import read_jsonl, read_lines, write_jsonl
from flash_lm.sweeps.jobs import JobFolder, finish, make_jobs, read_job_lines
from flash_lm.timing.turns import ROUNDS
from flash_lm.training.interrupt import stop_on_signal
from studies.recall.report import plot_recall, recall_table, summarize
from studies.recall.run import list_jobs, list_models, time_decoding


def main(argv: list[str]) -> None:
    """Makes the missing runs, times decoding, and writes table.md, summary.jsonl and recall.png."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--config", required=True, help="a file of studies/recall/configs/ that has MODELS, WIDTHS and RATES"
    )
    parser.add_argument("--runs", required=True, type=local_path, help="folder for runs in progress")
    parser.add_argument("--out", required=True, type=local_path, help="folder for the results")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="turns of each model, when decoding is timed")
    arguments = parser.parse_args(argv)
    module, out = load_module(arguments.config), arguments.out
    if not hasattr(module, "MODELS"):
        raise InputError(
            f"{arguments.config} names no models: give a file like studies/recall/configs/mqar_as_measured.py"
        )
    out.mkdir(parents=True, exist_ok=True)
    # Make the missing runs; other processes may still be at work.
    models = list_models(module.get_config(), module.MODELS, module.WIDTHS)
    further = getattr(module, "MORE_RATES", 0)
    with stop_on_signal() as should_stop:
        jobs_now = lambda: list_jobs(models, module.RATES, module.MORE_SEEDS, further, out)
        job_folder = JobFolder(out, arguments.runs, should_stop)
        if not finish(make_jobs(jobs_now, job_folder), job_folder):
            return
    # Time decoding if the models have changed.
    times = read_lines(out / "times.jsonl")
    if [(line["model"], line["width"]) for line in times] != [(model.name, model.width) for model in models]:
        write_jsonl(out / "times.jsonl", time_decoding(models, arguments.rounds))
    # Write summary, table and picture.
    lines = summarize(read_job_lines(out), read_jsonl(out / "times.jsonl"))
    write_jsonl(out / "summary.jsonl", lines)
    text = recall_table(lines)
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_recall(lines, out / "recall.png")
    print(text)


if __name__ == "__main__":
    run(main)
