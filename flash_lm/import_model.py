"""flash-lm import --model=downloads/SmolLM-135M --out=imported/smol."""

import argparse

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm import", description=main.__doc__)
    files = "a folder with config.json and *.safetensors or pytorch_model.bin, or a file: .gguf, or RWKV-4's .pth"
    parser.add_argument("--model", required=True, type=local_path, help=files)
    parser.add_argument("--out", required=True, type=local_path, help="folder to write; must not exist yet")
    add_plugins_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Converts a model of another library, whose format it recognises, to a folder that the other commands read."""
    arguments = flags().parse_args(argv)
    from flash_lm.inference.import_hf import import_with_message

    use_plugins(arguments)
    print(import_with_message(arguments.model, arguments.out).message)
    print(f"{arguments.out}: a --workdir for evaluate, generate, serve and export, or a --config.train.init_from")


if __name__ == "__main__":
    run(main, flags)
