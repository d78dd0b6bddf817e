"""python -m flash_lm.train --config=configs/quickstart.py [--workdir=runs/x] [--config.model.num_layers=4 …]."""

import argparse
import pathlib

from flash_lm.cli.flags import add_begin_flags, begin
from flash_lm.cli.load import add_config_flag, config_name, load_config
from flash_lm.cli.run import run
from flash_lm.errors import InputError, Stopped
from flash_lm.runs.run_name import run_name


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="python -m flash_lm.train", description=main.__doc__)
    add_config_flag(parser)
    parser.add_argument("--workdir", help="the run's folder; default: runs/<name of the config>")
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
    begin(arguments)
    if arguments.workdir is None and pathlib.Path(arguments.config).is_dir():
        raise InputError(f"--config={arguments.config} is a folder: set the new run's folder with --workdir")
    # A missing accelerator is reported, and the folder must not name a checkpoint.
    report_unused_accelerator()
    workdir = run_name(arguments.workdir or f"runs/{config_name(arguments.config)}")
    if workdir.suffix:
        raise InputError(f"--workdir={workdir} names a checkpoint: use --config.train.branch_from={workdir}")
    # A signal ends the loop after the step in progress.
    with stop_on_signal() as should_stop:
        done = train(config, workdir.workdir, should_stop, profile, arguments.debug_nonfinite, process_start_time())
    if not done:
        raise Stopped


if __name__ == "__main__":
    run(main, flags)
