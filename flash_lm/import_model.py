"""flash-lm import --model=downloads/SmolLM-135M --out=imported/smol."""

import argparse
import pathlib

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.errors import InputError
from flash_lm.runs.run_name import HUB


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm import", description=main.__doc__)
    files = "a folder with config.json and *.safetensors or pytorch_model.bin, or a file: .gguf, or RWKV-4's .pth; "
    parser.add_argument("--model", required=True, help=files + "or hub:OWNER/NAME, of which safetensors are downloaded")
    parser.add_argument("--out", required=True, type=local_path, help="folder to write; must not exist yet")
    add_plugins_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Converts a model of another library, whose format it recognises, to a folder that the other commands read."""
    arguments = flags().parse_args(argv)
    from flash_lm.inference.import_hf import import_with_message

    use_plugins(arguments)
    print(import_with_message(_folder(arguments.model), arguments.out).message)
    print(f"{arguments.out}: a --workdir for evaluate, generate, serve and export, or a --config.train.init_from")


def _folder(name: str) -> pathlib.Path:
    """The model's file or folder; one on the hub is downloaded.

    Raises:
        InputError: it cannot be downloaded, or the name may be one on the hub and lacks hub:.
    """
    from flash_lm.training.hub import download_foreign

    if name.startswith(HUB):
        return download_foreign(name)
    path = local_path(name)
    if not path.exists() and name.count("/") == 1:
        raise InputError(f"there is no folder {name}: for the model of this name on the hub give --model={HUB}{name}")
    return path


if __name__ == "__main__":
    run(main, flags)
