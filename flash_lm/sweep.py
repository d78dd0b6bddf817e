"""python -m flash_lm.sweep --config=configs/quickstart.py --grid="model.chunks.size=64,128" [--workdir=runs/x …]."""

import argparse
import logging
import pathlib
from typing import Any

from flash_lm.command import load_config, load_module, run, whole_numbers
from flash_lm.errors import InputError
from flash_lm.run_flags import CONFIG_HELP, add_cache_flag, set_cache


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="python -m flash_lm.sweep", description=main.__doc__)
    parser.add_argument("--config", required=True, help=CONFIG_HELP)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--grid", action="append", default=[], metavar="KEY=VALUE,VALUE…", help="repeat for each key")
    what.add_argument("--runs", help="a file of configs/ablations/ that defines the runs; default: --config")
    parser.add_argument(
        "--workdir", type=pathlib.Path, help="folder for the runs; default: runs/<name of the file>_sweep"
    )
    parser.add_argument("--split", default="validation", choices=("validation", "test"), help="the split to score")
    parser.add_argument("--lengths", default="", help="row lengths to score, such as 512,1024; default: as trained")
    add_cache_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Trains and evaluates every combination of a grid, or every run of a file in configs/ablations/.

    Run the same command again to continue where it stopped. At the end it writes table.md and curves.png to the folder.
    """
    arguments, overrides = flags().parse_known_args(argv)
    from flash_lm.analysis.comparison import write_comparison
    from flash_lm.study import check_runs, grid_runs, in_workdir, raise_failures, run_study
    from flash_lm.training.interrupt import stop_on_signal

    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # else every run would log the keys that its family ignores
    lengths = whole_numbers(arguments.lengths, "--lengths") if arguments.lengths else []
    config, file = load_config(arguments.config, overrides), arguments.runs or arguments.config
    if arguments.grid:
        runs, impossible = grid_runs(config, arguments.grid)
        for sentence in impossible:
            print(sentence)
    else:
        module: Any = load_module(file)
        if not hasattr(module, "get_runs"):
            raise InputError(f"{file} defines no runs: give --grid, or --runs with a file in configs/ablations/")
        runs = module.get_runs(config)
        check_runs(config, runs)
    workdir = arguments.workdir or pathlib.Path("runs") / f"{pathlib.Path(file).stem}_sweep"
    if (workdir / "config.json").exists():
        raise InputError(f"{workdir} contains a single run: choose another --workdir")
    runs = in_workdir(runs, workdir)
    set_cache(arguments)
    with stop_on_signal() as should_stop:
        failures = run_study(config, runs, workdir, arguments.split, should_stop, lengths)
    text = write_comparison([workdir / name for name in runs], arguments.split, workdir)
    print(f"\n{text or 'no run has finished yet: run the same command again to continue'}")
    raise_failures(failures)


if __name__ == "__main__":
    run(main, flags)
