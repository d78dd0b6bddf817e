"""flash-lm export --workdir=runs/x[@best] --out=exported/x --license=apache-2.0 [--format=llama]."""

import argparse
import pathlib

from flash_lm.cli.flags import add_run_flags, parse_run
from flash_lm.cli.run import run
from flash_lm.cli.types import any_path, positive
from flash_lm.config.addresses import is_remote
from flash_lm.config.model import DTYPES
from flash_lm.errors import InputError

_FORMAT_HELP = (
    "stablehlo: compiled functions that need jax alone; or a format of another library, such as llama, qwen3, gpt2 or "
    "mamba2 (docs/pretrained.md lists them); default: flash_lm"
)
_SIZES = {
    "rows": "texts at the same time; default: 1",
    "piece": "tokens of a prompt at a time; default: 128",
    "capacity": "most tokens of a text, where the state grows; default: model.max_length",
}


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm export", description=main.__doc__)
    add_run_flags(parser)
    parser.add_argument("--out", required=True, type=any_path, help="folder to write; must not exist yet")
    parser.add_argument("--license", required=True, help="the model's licence for its card, such as apache-2.0")
    parser.add_argument("--format", default="flash_lm", help=_FORMAT_HELP)
    for name, help_ in _SIZES.items():
        parser.add_argument(f"--{name}", type=positive, help=f"of --format=stablehlo: {help_}")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload the folder to this repository of the hub")
    parser.add_argument("--private", action="store_true", help="of --push: a new repository is private")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of parameters and computation; default: as trained")
    return parser


def main(argv: list[str]) -> None:
    """Writes a checkpoint as safetensors with its config, its tokenizer and a model card; perhaps uploads it."""
    arguments = flags().parse_args(argv)
    # Flags that need another flag.
    if arguments.private and not arguments.push:
        raise InputError("--private belongs to --push=OWNER/NAME: leave it out, or say where to upload")
    if arguments.push and is_remote(arguments.out):
        raise InputError(f"--push uploads a folder of this machine, not --out={arguments.out}: give a local path")
    given = {name: value for name in _SIZES if (value := getattr(arguments, name)) is not None}
    if given and arguments.format != "stablehlo":
        raise InputError(f"--{', --'.join(given)} belong to --format=stablehlo: leave them out, or give that format")
    from flash_lm.inference.export import check_export, export
    from flash_lm.inference.model import load_model
    from flash_lm.inference.stablehlo import Sizes
    from flash_lm.runs.hosts import is_first
    from flash_lm.runs.lost_hosts import report_lost_host
    from flash_lm.training.hub import make_repository

    name, mesh = parse_run(arguments)
    with report_lost_host():
        # Everything that can be refused is checked before the folder is written.
        trained = load_model(name, dtype=arguments.dtype, mesh_shape=mesh)
        asked = (trained, arguments.out, arguments.license, arguments.format, Sizes(**given))
        check_export(*asked)
        if arguments.push and is_first():
            make_repository(arguments.push, private=arguments.private)  # what is wrong there is said before writing
        messages = export(*asked, on_hub=arguments.push)
    # The report, and the upload.
    if is_first():
        print(f"{arguments.out}: {trained.model.parameter_count():,} parameters of {name}, step {trained.step}")
        print("\n".join(messages), end="\n" if messages else "")
        if arguments.push:
            _push(arguments.out, arguments.push)


def _push(folder: pathlib.Path, name: str) -> None:
    from flash_lm.training.hub import push

    try:
        print(f"uploaded: {push(folder, name)}")
    except InputError as error:
        raise InputError(f"{error}; {folder} is written: upload it with hf upload {name} {folder}") from None


if __name__ == "__main__":
    run(main, flags)
