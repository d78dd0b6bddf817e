"""python -m flash_lm.import_model --model=downloads/SmolLM-135M --out=imported/smol."""

import argparse

from flash_lm.cli.run import run
from flash_lm.cli.types import local_path


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="python -m flash_lm.import_model", description=main.__doc__)
    parser.add_argument("--model", required=True, type=local_path, help="folder with config.json and *.safetensors")
    parser.add_argument("--out", required=True, type=local_path, help="folder to write; must not exist yet")
    return parser


def main(argv: list[str]) -> None:
    """Converts a Llama downloaded from the Hugging Face hub to a folder that the other commands read."""
    arguments = flags().parse_args(argv)
    from flash_lm.inference.import_llama import import_hf

    import_hf(arguments.model, arguments.out)
    print(f"{arguments.out}: a --workdir for evaluate, generate, serve and export, or a --config.train.init_from")


if __name__ == "__main__":
    run(main, flags)
