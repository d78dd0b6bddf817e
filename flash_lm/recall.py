"""flash-lm recall --models="mine all" --config.plugins=mine [--config=recall/mqar --rates="0.003 0.01" --seeds=3 …]."""

import argparse
import pathlib
from typing import Any

from flash_lm.cli.figure_flags import add_figure_flags, figure_output
from flash_lm.cli.flags import add_cache_flag, set_cache
from flash_lm.cli.load import load_config, load_module, split_preset
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, parse_integers, positive, split_words
from flash_lm.errors import InputError

_MODELS = ("transformer_plus_plus", "based", "linear_transformer")


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm recall", description=main.__doc__)
    parser.add_argument(
        "--config", default="recall/mqar", help="a config whose corpus has answers; default: recall/mqar"
    )
    parser.add_argument(
        "--models",
        help="families, separated by spaces, perhaps with keys, as in flash+short_convolution=5; all: each that can do "
        f"the task; default: those of the config, or {' '.join(_MODELS)}",
    )
    parser.add_argument("--widths", help="values of model.model_dim; default: of the config")
    parser.add_argument("--rates", help="learning rates, of which each model gets its best; default: of the config")
    parser.add_argument("--seeds", type=positive, help="seeds at the best rate; default: of the config, or 1")
    parser.add_argument(
        "--workdir",
        type=local_path,
        default=pathlib.Path("runs/recall"),
        help="for the runs; default: runs/recall",
    )
    parser.add_argument("--out", type=local_path, help="folder for the results; default: that of --workdir")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each model, when decoding is timed")
    add_figure_flags(parser)
    add_cache_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Compares models on recall: a table, and a picture of accuracy by model, decode state and time per token.

    Each model is trained at each rate with the first seed; the rate with the best accuracy on the validation split gets
    the other seeds. Every run is scored on the test split, by parts, and its line is written at once. At the end the
    decode steps are timed, and models take turns. Run again, the command continues where it stopped; started once per
    core, it shares the runs.
    """
    arguments, overrides = flags().parse_known_args(argv)
    output = figure_output(arguments)
    config: Any = load_config(arguments.config, overrides)
    set_cache(arguments)
    from flash_lm.report.figure import can_draw
    from flash_lm.report.recall import plot_recall, recall_table
    from flash_lm.runs.jsonl import read_jsonl, read_lines, write_jsonl
    from flash_lm.sweeps.jobs import JobFolder, finish, make_jobs, read_job_lines
    from flash_lm.sweeps.recall import list_jobs, list_models, name_models, summarize, time_decoding
    from flash_lm.training.interrupt import stop_on_signal

    # The models, widths, rates and seeds: of the flags, or else of the config file.
    module = load_module(split_preset(arguments.config)[0])
    words = arguments.models.split() if arguments.models else getattr(module, "MODELS", _MODELS)
    widths = parse_integers(arguments.widths, "--widths") if arguments.widths else None
    widths = widths or getattr(module, "WIDTHS", (config.model.model_dim,))
    rates = _rates(arguments.rates) or getattr(module, "RATES", (config.train.learning_rate,))
    seeds = range(1, arguments.seeds) if arguments.seeds else getattr(module, "MORE_SEEDS", ())
    models = list_models(config, name_models(words, config), widths)
    # Make the missing runs; other processes may still be at work.
    out = arguments.out or arguments.workdir
    further = 0 if arguments.rates else getattr(module, "MORE_RATES", 0)
    with stop_on_signal() as should_stop:
        jobs_now = lambda: list_jobs(models, rates, seeds, further, out)
        job_folder = JobFolder(out, arguments.workdir / "in_progress", should_stop)
        if not finish(make_jobs(jobs_now, job_folder), job_folder):
            return
    # Time decoding if there are new models; the lines of others stay.
    times = read_lines(out / "times.jsonl")
    asked = {(model.name, model.width) for model in models}
    if not asked <= {(line["model"], line["width"]) for line in times if "ms_a_token" in line}:
        others = [line for line in times if (line["model"], line["width"]) not in asked]
        write_jsonl(out / "times.jsonl", others + time_decoding(models, arguments.rounds))
    # Write summary, table and picture.
    lines = summarize(read_job_lines(out), read_jsonl(out / "times.jsonl"))
    write_jsonl(out / "summary.jsonl", lines)
    text = recall_table(lines)
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_recall(lines, out / "recall.png", output)
    print(text)


def _rates(text: str | None) -> list[float]:
    """The learning rates of --rates, in increasing order.

    Raises:
        InputError: one is no positive number.
    """
    try:
        rates = sorted({float(word) for word in split_words(text or "")})
    except ValueError:
        rates = [0.0]
    if any(not 0 < rate < float("inf") for rate in rates):
        raise InputError(f'--rates={text} must be positive numbers, such as "0.003 0.01 0.03"')
    return rates


if __name__ == "__main__":
    run(main, flags)
