"""python -m flash_lm.train --config=configs/quickstart.py [--workdir=runs/x] [--config.model.num_layers=4 …]."""

import argparse
import pathlib

from flash_lm.command import load_config, run
from flash_lm.errors import InputError
from flash_lm.run_flags import HOSTS, HOSTS_HELP, join_hosts
from flash_lm.run_name import NEWEST, run_name
from flash_lm.training.interrupt import stop_on_signal
from flash_lm.training.loop import train
from flash_lm.training.profile import parse_span


def main(argv: list[str]) -> None:
    """Trains a config, or resumes its run; running the same command again goes on where it stopped."""
    parser = argparse.ArgumentParser(prog="python -m flash_lm.train", description=main.__doc__)
    parser.add_argument("--config", required=True, help="a file of configs/; --config.KEY=VALUE overrides a key of it")
    parser.add_argument("--workdir", help="folder of the run; default: runs/<name of the config file>")
    parser.add_argument("--profile", metavar="START:STOP", help="trace the steps after START up to STOP")
    parser.add_argument("--hosts", metavar=HOSTS, help=HOSTS_HELP)
    parser.add_argument(
        "--debug_nonfinite", action="store_true", help="find the layer where a NaN or Inf begins; slower"
    )
    arguments, overrides = parser.parse_known_args(argv)
    profile = parse_span(arguments.profile) if arguments.profile else None
    config = load_config(arguments.config, overrides)
    join_hosts(arguments.hosts)
    workdir = run_name(arguments.workdir or f"runs/{pathlib.Path(arguments.config).stem}")
    if workdir.which != NEWEST:
        raise InputError(f"--workdir={workdir} names a checkpoint: go on with --config.train.branch_from={workdir}")
    with stop_on_signal() as should_stop:
        train(config, workdir.workdir, should_stop, profile, arguments.debug_nonfinite)


if __name__ == "__main__":
    run(main)
