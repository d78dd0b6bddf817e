"""flash-lm sweep --config=configs/quickstart.py --grid="model.chunks.size=64,128" [--workdir=runs/x …]."""

import argparse
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flash_lm.cli.figure_flags import add_figure_flags, figure_output
from flash_lm.cli.flags import add_cache_flag, set_cache
from flash_lm.cli.load import add_config_flag, config_name, load_config, load_module, split_preset
from flash_lm.cli.run import run
from flash_lm.cli.types import count, local_path, parse_integers, positive
from flash_lm.errors import InputError
from flash_lm.report.figure import Output

Runs = Mapping[str, Mapping[str, Any]]  # what differs in each run, by name
_ALL = 10**9  # more than the runs of any sweep


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm sweep", description=main.__doc__, allow_abbrev=False)
    add_config_flag(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--grid", action="append", default=[], metavar="KEY=VALUE,VALUE…", help="repeat for each key")
    what.add_argument("--runs", help="a file of configs/ablations/ that defines the runs; default: --config")
    parser.add_argument(
        "--workdir", type=local_path, help="folder for the runs; default: runs/<name of the file>_sweep"
    )
    parser.add_argument("--tune", metavar="KEY", help="find the best value of a key, such as train.learning_rate")
    parser.add_argument("--budget", type=count, metavar="TOKENS", help="of the longest runs of --tune, such as 2M")
    parser.add_argument("--split", default="validation", choices=("validation", "test"), help="the split to score")
    parser.add_argument(
        "--vmap",
        type=count,
        nargs="?",
        const=_ALL,
        default=1,
        metavar="N",
        help="train up to N runs (default: all) that differ only in seed and train.learning_rate as one program",
    )
    parser.add_argument("--lengths", default="", help="lengths to score, such as 512,1024; default: as trained")
    parser.add_argument(
        "--seeds", type=positive, default=1, metavar="N", help="train each run with N seeds, from that of the config on"
    )
    add_figure_flags(parser)
    add_cache_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Trains and evaluates every combination of a grid, or every run of a file in configs/ablations/.

    Run the same command again to continue where it stopped. At the end it writes table.md and curves.png to the folder;
    with --seeds curves have bands, and the table has intervals and verdicts against the first run.
    With --tune it finds the best value of a key for each of these runs instead, and writes table.md and tuning.png.
    """
    arguments, overrides = flags().parse_known_args(argv)
    from flash_lm.sweeps.grid import resolve_workdir
    from flash_lm.training.interrupt import stop_on_signal

    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # else every run would log the keys that its family ignores
    # Flags that do not go together.
    if bool(arguments.tune) != bool(arguments.budget):
        raise InputError("--tune and --budget go together: --tune=train.learning_rate --budget=2M")
    if arguments.tune and (arguments.split != "validation" or arguments.lengths):
        raise InputError(
            "--tune compares runs on the validation split as they are trained: leave --split and --lengths"
        )
    if arguments.tune and arguments.seeds > 1:
        raise InputError("--tune has the seed of the config: set --config.seed, and leave --seeds")
    output = figure_output(arguments)  # raises
    # The runs of the grid or of the file, and the folder for them.
    config: Any = load_config(arguments.config, overrides)
    runs = with_seeds(_runs(arguments, config), range(config.seed, config.seed + arguments.seeds))
    workdir = arguments.workdir or _workdir(arguments)
    if (workdir / "config.json").exists():
        raise InputError(f"{workdir} contains a single run: choose another --workdir")
    # Tune a key, or train and score each run.
    set_cache(arguments)
    runs = resolve_workdir(runs, workdir)
    with stop_on_signal() as should_stop:
        if arguments.tune:
            _tune(arguments, config, runs, workdir, output, should_stop)
        else:
            _score(arguments, config, runs, workdir, output, should_stop)


def _runs(arguments: argparse.Namespace, config: Any) -> Runs:
    """The runs of the grid or of the file, or with --tune alone the config itself."""
    from flash_lm.sweeps.grid import check_runs, grid_runs

    if arguments.grid:
        runs, impossible = grid_runs(config, arguments.grid)
        for sentence in impossible:
            print(sentence)
        return runs
    file = arguments.runs or split_preset(arguments.config)[0]
    if arguments.tune and not arguments.runs:
        return {str(config.model.family): {}}
    module: Any = load_module(file)
    if not hasattr(module, "get_runs"):
        raise InputError(f"{file} defines no runs: give --grid, or --runs with a file in configs/ablations/")
    runs = module.get_runs(config)
    check_runs(config, runs)
    return runs


def with_seeds(runs: Runs, seeds: Sequence[int]) -> Runs:
    """Each run with each seed; a single seed stays that of the config.

    >>> [*with_seeds({"both": {}, "local": {}}, range(2))]
    ['both,seed=0', 'both,seed=1', 'local,seed=0', 'local,seed=1']
    """
    if len(seeds) == 1:
        return runs
    return {f"{name},seed={seed}": {**changes, "seed": seed} for name, changes in runs.items() for seed in seeds}


def _workdir(arguments: argparse.Namespace) -> pathlib.Path:
    kind = "tuning" if arguments.tune else "sweep"
    return pathlib.Path("runs") / f"{config_name(arguments.runs or arguments.config)}_{kind}"


def _score(
    arguments: argparse.Namespace,
    config: Any,
    runs: Runs,
    workdir: pathlib.Path,
    output: Output,
    should_stop: Callable[[], bool],
) -> None:
    from flash_lm.report.comparison import write_comparison
    from flash_lm.sweeps.grid import raise_failures, raise_stopped, run_study

    lengths = parse_integers(arguments.lengths, "--lengths") if arguments.lengths else []
    failures = run_study(config, runs, workdir, arguments.split, should_stop, lengths, arguments.vmap)
    text = write_comparison([workdir / name for name in runs], arguments.split, workdir, output=output)
    print(f"\n{text or 'no run has finished yet: run the same command again to continue'}")
    raise_stopped(should_stop)
    raise_failures(failures)


def _tune(
    arguments: argparse.Namespace,
    config: Any,
    runs: Runs,
    workdir: pathlib.Path,
    output: Output,
    should_stop: Callable[[], bool],
) -> None:
    from flash_lm.report.tuning import write_tuning
    from flash_lm.sweeps.tuning import best_values, tune

    lines = tune(config, runs, arguments.tune, arguments.budget, workdir, should_stop, arguments.vmap)
    print(f"\n{write_tuning(lines, best_values(lines), workdir, output)}")


if __name__ == "__main__":
    run(main, flags)
