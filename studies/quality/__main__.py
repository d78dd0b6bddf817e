"""Runs the quality study, times its steps and writes its report. The README.md of this folder has the design.

    python -m studies.quality --workdir=runs/study --corpus=runs/study/data --out=studies/quality/results
    python -m studies.quality --time --corpus=runs/study/data --out=studies/quality/results
    python -m studies.quality --out=studies/quality/results    # tables, verdicts and pictures

--runs makes the missing runs, and --time times steps, both of all parts or of those that --parts names. Without either,
tables and pictures are written from the lines in OUT. Words such as --config.model.residual_init=as_init change the
config of all models.
"""

import argparse
import logging
import pathlib
from typing import Any

from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive, split_words
from flash_lm.config.overrides import apply_overrides
from flash_lm.errors import InputError
from flash_lm.runs.provenance import hash_of_files
from flash_lm.sweeps.jobs import JobFolder, finish, make_jobs, read_job_lines
from flash_lm.timing.turns import ROUNDS
from flash_lm.training.interrupt import stop_on_signal
from studies.quality import config as study
from studies.quality.report import write_study
from studies.quality.run import list_jobs, select_parts
from studies.quality.step_times import time_parts


def main(argv: list[str]) -> None:
    """Makes the runs of the study, times their steps, or writes tables and pictures from their lines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workdir", type=local_path, metavar="FOLDER", help="make the missing runs in this folder")
    parser.add_argument("--time", action="store_true", help="time the steps of models that have lines")
    parser.add_argument("--parts", metavar="NAMES", help="separated by spaces; default: all")
    parser.add_argument("--corpus", type=local_path, help="the folder that python -m studies.quality.data has written")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="rounds of the timing")
    parser.add_argument("--out", required=True, type=local_path, help="folder of the lines")
    arguments, overrides = parser.parse_known_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides the keys that a family ignores
    config: Any = study.get_config()
    out = arguments.out
    apply_overrides(config, overrides)
    if (config.train.accumulate or 1) > 1:
        raise InputError("the study times whole steps: leave --config.train.accumulate at 1")
    # Without --runs and --time: only the report.
    if not (arguments.workdir or arguments.time):
        if arguments.parts or overrides:
            raise InputError("--parts and --config.… change what --runs makes or --time times: give one of them, too")
        print(write_study(study.TITLE, study.get_hypotheses(), out))
        return
    if not arguments.corpus:
        raise InputError(
            "the study reads the folder that python -m studies.quality.data has written: give it as --corpus"
        )
    # Parts and texts.
    config.data.mixture = study.mixture(arguments.corpus)
    parts = study.get_parts()
    parts = select_parts(split_words(arguments.parts), parts) if arguments.parts else parts
    # Make the missing runs, then time the steps.
    if arguments.workdir:
        texts = hash_of_files(pathlib.Path(arguments.corpus), (".jsonl", ".parquet"))
        with stop_on_signal() as should_stop:
            jobs_now = lambda: list_jobs(config, parts, study.MODELS, study.TUNING_STEPS, texts, out)
            job_folder = JobFolder(out, arguments.workdir, should_stop)
            finish(make_jobs(jobs_now, job_folder), job_folder)
    if arguments.time:
        time_parts(config, parts, read_job_lines(out), arguments.rounds, out / "step_times.jsonl")


if __name__ == "__main__":
    run(main)
