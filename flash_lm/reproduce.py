"""flash-lm reproduce --table=wiki40b --out=runs/wiki40b [--scale=small --corpus=books --families="flash …"]."""

import argparse
import logging
import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from flash_lm.cli.figure_flags import add_figure_flags, figure_output
from flash_lm.cli.load import load_module
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.config.changes import apply_changes
from flash_lm.config.overrides import apply_overrides
from flash_lm.errors import InputError, one_of_names

_FOLDER = pathlib.Path(__file__).parent / "configs" / "tables"
TABLES = {path.stem: path for path in sorted(_FOLDER.glob("[!_]*.py"))}  # name -> config


def set_corpus(config: ConfigDict, corpus: str) -> ConfigDict:
    """Returns the config with another corpus: stdlib, a folder or file of a data set, or text files."""
    from flash_lm.data.corpus_of_path import corpus_of_path

    kind = "stdlib" if corpus == "stdlib" else corpus_of_path(corpus)
    local: dict[str, Any] = {"data.corpus": kind, "data.streaming": False, "data.name": None, "data.config": None}
    return apply_changes(config, local | {"data.path": None if kind == "stdlib" else corpus})


def commands(launcher: str, table: str, workdir: pathlib.Path, words: list[str], split: str) -> list[str]:
    """Returns the commands that train and score one run of a table.

    Args:
        launcher: program that takes the name of a command and its flags, such as `python -m flash_lm`.
        table: a key of TABLES.
        workdir: the run's folder.
        words: overrides that turn the table's config into the run's.
        split: the split to score.
    """
    train = ["train", f"--config=tables/{table}", f"--workdir={workdir}", *words]
    evaluate = ["evaluate", f"--workdir={workdir}", f"--split={split}"]
    return [f"{launcher} {shlex.join(line)}" for line in (train, evaluate)]


def _of_families(runs: Any, config: Any, families: list[str]) -> Any:
    """The runs of some families.

    Raises:
        InputError: the table has no run of a family.
    """
    family_of = {name: str(apply_changes(config, changes).model.family) for name, changes in runs.items()}
    known = list(dict.fromkeys(family_of.values()))
    for family in families:
        if expected := one_of_names(family, known):
            raise InputError(f"--families: the table has no run of {family}: give {expected}")
    return {name: changes for name, changes in runs.items() if family_of[name] in families}


def overrides_between(base: ConfigDict, config: ConfigDict) -> list[str]:
    """Returns the overrides that turn one config into another, such as --config.model.num_layers=4."""
    before = dict(flatten(base))
    return [f"--config.{key}={'' if x is None else x}" for key, x in flatten(config) if before[key] != x]


def flatten(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys of a config, such as model.gau.heads, with their values."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm reproduce", description=main.__doc__)
    parser.add_argument("--table", required=True, choices=TABLES)
    parser.add_argument("--scale", default="paper", choices=("paper", "small"))
    parser.add_argument(
        "--corpus", help="stdlib, text files (a folder or a glob), or the folder of a data set; default: the paper's"
    )
    parser.add_argument("--split", default="test", choices=("validation", "test"), help="the split to score")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of the timing")
    parser.add_argument(
        "--commands",
        nargs="?",
        const="python -m flash_lm",
        metavar="LAUNCHER",
        help="only print a command for each run, starting with this launcher, such as scripts/launch/tpu_pod.sh",
    )
    parser.add_argument("--out", required=True, type=local_path, help="folder to write")
    parser.add_argument("--families", help="only the runs of these families, separated by spaces; default: all")
    add_figure_flags(parser)
    return parser


def main(argv: list[str]) -> None:
    """Trains, scores and times the runs of a table of the papers, and compares them with the paper's figures.

    At the papers' scale each table has its data set. At small scale any corpus will do. Run again, the command goes on
    where it stopped. The folder gets table.md, results.jsonl, curves.png (quality against steps and time) and
    quality.png (against the time per step). It runs on one host; for several, --commands prints the commands of each
    run: docs/scaling.md.
    """
    arguments, overrides = flags().parse_known_args(argv)
    output = figure_output(arguments)
    from flash_lm.report.comparison import write_curves
    from flash_lm.report.figure import can_draw
    from flash_lm.report.reproduction import plot_quality_against_step_time, reproduction_table
    from flash_lm.report.results import newest_results
    from flash_lm.runs.jsonl import write_jsonl
    from flash_lm.sweeps.grid import check_runs, raise_failures, raise_stopped, run_study
    from flash_lm.timing.step_times import time_steps, timed_microbatches
    from flash_lm.training.interrupt import stop_on_signal

    if arguments.scale == "small" and not arguments.corpus:
        raise InputError("--scale=small needs a corpus: give --corpus=stdlib, text files, or the folder of a data set")
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides the keys that a family ignores
    # The table's config and runs at this scale, on the chosen corpus.
    table: Any = load_module(str(TABLES[arguments.table]))
    config = table.get_config(arguments.scale)
    apply_overrides(config, overrides)
    config = set_corpus(config, arguments.corpus) if arguments.corpus else config
    runs, figures = table.get_runs(arguments.scale), table.get_figures(arguments.scale)
    runs = _of_families(runs, config, arguments.families.split()) if arguments.families else runs
    workdirs = [arguments.out / "runs" / name for name in runs]
    # With --commands: only print a command per run.
    if arguments.commands:
        for name, workdir in zip(runs, workdirs, strict=True):
            words = overrides_between(table.get_config(), apply_changes(config, runs[name]))
            print("\n".join(commands(arguments.commands, arguments.table, workdir, words, arguments.split)))
        return
    # Time the steps, then train and score the missing runs.
    check_runs(config, runs)
    first = next(iter(runs))
    baseline_of = {name: getattr(table, "baseline", lambda run: first)(name) for name in runs}
    times = time_steps(config, runs, baseline_of, arguments.rounds, arguments.out / "step_times.jsonl")
    with stop_on_signal() as should_stop:
        failures = run_study(config, runs, arguments.out / "runs", arguments.split, should_stop)
    time_of, results = {line["run"]: line for line in times}, newest_results(workdirs, arguments.split)
    if not results:
        raise_stopped(should_stop)
        print("no run has finished yet: run the same command again to continue")
        return
    # Join results, step times and the paper's figures.
    microbatches = {name: timed_microbatches(apply_changes(config, runs[name])) for name in runs}
    step_s = {name: time_of[name]["microbatch_ms"] * microbatches[name] / 1000 for name in runs}
    paper = {name: {"paper": figure} for name, figure in figures.items()}
    lines = [line | time_of[line["run"]] | paper.get(line["run"], {}) for line in results]
    lines = [line | {"rated_seconds": line["step"] * step_s[line["run"]]} for line in lines]
    write_jsonl(arguments.out / "results.jsonl", lines)
    # Write table, curves and picture.
    title = f"{table.TITLE}; here {arguments.scale} scale on {lines[0]['corpus']}, {lines[0]['device']}"
    text = f"{title}\n\n{reproduction_table(lines, table.METRIC)}"
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    write_curves(workdirs, results, arguments.out, title, step_s=step_s, output=output)
    if can_draw():
        plot_quality_against_step_time(lines, table.METRIC, arguments.out / "quality.png", title, output)
    print(f"\n{text}")
    raise_stopped(should_stop)
    raise_failures(failures)


if __name__ == "__main__":
    run(main, flags)
