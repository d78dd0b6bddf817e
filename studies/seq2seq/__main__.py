"""Prefixes, cross attention and encoders: trains the models of a config and judges its rules.

    python -m studies.seq2seq --config=studies/seq2seq/configs/copy.py --workdir=runs/copy --out=runs/seq2seq/copy

Each model is trained at each rate with the first seed. The rate with the lowest loss on the validation split gets the
other seeds. Every run is scored on the test split, and its line is written at once. Run again, the command continues
where it stopped. Several processes can share the runs. OUT gets table.md, verdicts.jsonl and seq2seq.png. Words such as
--config.data.path=… change the config.
"""

import argparse

from flash_lm.cli.load import load_config, load_module
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.errors import InputError
from flash_lm.report.figure import can_draw
from flash_lm.report.ratios import SEEDS
from flash_lm.runs.jsonl import write_jsonl
from flash_lm.sweeps.jobs import JobFolder, finish, make_jobs, read_job_lines
from flash_lm.sweeps.rates import rate_and_seed_jobs
from flash_lm.training.interrupt import stop_on_signal
from studies.protocol.verdict import verdict_table
from studies.seq2seq.report import plot_seq2seq, selection_loss, seq2seq_table, summarize
from studies.seq2seq.run import list_models, run_model


def main(argv: list[str]) -> None:
    """Makes the missing runs, and writes table.md, verdicts.jsonl and seq2seq.png."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--config", required=True, help="a file of studies/seq2seq/configs/, with MODELS, RATES and RULES"
    )
    parser.add_argument("--workdir", required=True, type=local_path, help="folder for runs in progress")
    parser.add_argument("--out", required=True, type=local_path, help="folder for the results")
    arguments, words = parser.parse_known_args(argv)
    module, out = load_module(arguments.config), arguments.out
    if not hasattr(module, "RULES"):
        raise InputError(f"{arguments.config} is no such study: give a file like studies/seq2seq/configs/copy.py")
    # Make the missing runs; other processes may still be at work.
    models = list_models(load_config(arguments.config, words), module.MODELS)
    out.mkdir(parents=True, exist_ok=True)
    with stop_on_signal() as should_stop:
        jobs_now = lambda: rate_and_seed_jobs(
            models, module.RATES, module.MORE_SEEDS, 0, read_job_lines(out), selection_loss, run_model
        )
        job_folder = JobFolder(out, arguments.workdir, should_stop)
        if not finish(make_jobs(jobs_now, job_folder), job_folder):
            return
    # Write summary, verdicts, table and picture.
    lines = read_job_lines(out)
    of_models, verdicts = summarize(lines), [x.verdict_line(lines) for x in module.RULES]
    write_jsonl(out / "summary.jsonl", of_models)
    write_jsonl(out / "verdicts.jsonl", verdicts)
    rule = f"Gains of the first over the second, seed by seed; a verdict needs {SEEDS} seeds that agree."
    text = f"{seq2seq_table(of_models)}\n\n{verdict_table(rule, verdicts)}"
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_seq2seq(of_models, out / "seq2seq.png")
    print(text)


if __name__ == "__main__":
    run(main)
