"""flash-lm train --config=configs/quickstart.py [--workdir=runs/x] [--plan] [--config.KEY=VALUE …]."""

import argparse
import pathlib

from ml_collections import ConfigDict

from flash_lm.cli.flags import add_begin_flags, begin
from flash_lm.cli.load import add_config_flag, config_name, load_config
from flash_lm.cli.run import run
from flash_lm.errors import InputError, Stopped
from flash_lm.runs.run_name import run_name
from flash_lm.runs.storage import to_path


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm train", description=main.__doc__)
    add_config_flag(parser)
    parser.add_argument("--workdir", help="the run's folder, perhaps at gs://; default: runs/<name of the config>")
    parser.add_argument(
        "--plan",
        nargs="?",
        const="",
        metavar="CHIP[:COUNT]",
        help="print parameters, memory, FLOPs and estimated hours on these devices, such as H200:8 (alone: on this "
        "machine's), and end; nothing is trained or written",
    )
    parser.add_argument("--profile", metavar="START:STOP", help="trace the steps from START + 1 to STOP")
    add_begin_flags(parser)
    parser.add_argument(
        "--debug_nonfinite", action="store_true", help="find the layer where a NaN or Inf first appears; slower"
    )
    return parser


def main(argv: list[str]) -> None:
    """Trains a config, or resumes its run: run the same command again to continue where it stopped."""
    arguments, overrides = flags().parse_known_args(argv)
    from flash_lm.training.clock import process_start_time
    from flash_lm.training.device import report_unused_accelerator
    from flash_lm.training.interrupt import stop_on_signal
    from flash_lm.training.profile import parse_span
    from flash_lm.training.train_loop import train

    # Everything that needs no device is checked before JAX looks for one.
    profile = parse_span(arguments.profile) if arguments.profile else None
    config = load_config(arguments.config, overrides)
    workdir = _workdir(arguments)
    if arguments.plan is not None:
        return _print_plan(config, workdir, arguments)
    begin(arguments)
    report_unused_accelerator()
    # A signal ends the loop after the step in progress.
    with stop_on_signal() as should_stop:
        done = train(config, workdir, should_stop, profile, arguments.debug_nonfinite, process_start_time())
    if not done:
        raise Stopped


def _workdir(arguments: argparse.Namespace) -> pathlib.Path:
    """The run's folder.

    Raises:
        InputError: it is open and the config names none, or it names a checkpoint.
    """
    if arguments.workdir is None and to_path(arguments.config).is_dir():
        raise InputError(f"--config={arguments.config} is a folder: set the new run's folder with --workdir")
    name = run_name(arguments.workdir or f"runs/{config_name(arguments.config)}")
    if name.suffix:
        raise InputError(f"--workdir={name} names a checkpoint: use --config.train.branch_from={name}")
    return name.workdir


def _print_plan(config: ConfigDict, workdir: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Prints what the run will need.

    Raises:
        InputError: a bad config or chip, or --hosts is set, whose devices a plan cannot see.
    """
    from flash_lm.cli.compile_cache import compile_without_cache
    from flash_lm.cli.plan_text import plan_text
    from flash_lm.training.device import report_unused_accelerator
    from flash_lm.training.plan import make_plan, parse_target, plan_config

    if arguments.hosts:
        raise InputError("--plan is made by one process: leave --hosts out, and give --plan=CHIP:COUNT")
    compile_without_cache()
    if not arguments.plan:
        report_unused_accelerator()
    target = parse_target(arguments.plan)
    print(plan_text(make_plan(plan_config(config, workdir, target.count), target)))


if __name__ == "__main__":
    run(main, flags)
