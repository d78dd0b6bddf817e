"""flash-lm convert --model=runs/smol/smollm2 --out=runs/smol/mixed --config.model.family=mc_tfm …."""

import argparse

from flash_lm.cli.flags import add_run_flags, parse_run
from flash_lm.cli.load import given_keys, load_run_config
from flash_lm.cli.run import run
from flash_lm.cli.types import any_path


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(
        prog="flash-lm convert",
        description=main.__doc__,
        epilog="--config.KEY=VALUE sets a key of the new model, such as --config.model.family=mc_tfm; all others are "
        "those of the model that is converted.",
    )
    add_run_flags(parser, "--model")
    parser.add_argument("--out", required=True, type=any_path, help="folder to write; must not exist yet")
    return parser


def main(argv: list[str]) -> None:
    """Converts a model to another family: takes the weights that both have, and initialises the others."""
    arguments, overrides = flags().parse_known_args(argv)
    from flash_lm.inference.convert import convert_model, describe
    from flash_lm.runs.hosts import is_first
    from flash_lm.runs.lost_hosts import report_lost_host

    name, mesh = parse_run(arguments)
    with report_lost_host():
        raw = load_run_config(name.workdir, overrides)
        converted = convert_model(name, raw, given_keys(overrides), arguments.out, mesh)
    if is_first():
        print(describe(name, arguments.out, converted))


if __name__ == "__main__":
    run(main, flags)
