"""flash-lm generate --workdir=runs/x --prompt="…" [--max_tokens=200 --temperature=0.8 --top_p=0.95 …]."""

import argparse
import dataclasses
import pathlib
import sys

from flash_lm.cli.flags import add_run_flags, parse_run
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.config.model import DTYPES
from flash_lm.errors import InputError
from flash_lm.inference.settings import CAUSAL_ONLY, MASKED_ONLY, SAMPLING_HELP, Sampling


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm generate", description=main.__doc__)
    add_run_flags(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue; default: read from standard input")
    source.add_argument("--prompt_file", type=local_path, help="read the prompt from a UTF-8 file")
    parser.add_argument("--json", action="store_true", help="JSON lines, with tokens and log-probabilities")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of parameters and computation; default: as trained")
    causal = parser.add_argument_group("causal language models")
    chat_help = "the prompt is the message of a user, to be answered: for a model with a chat template"
    causal.add_argument("--chat", action="store_true", default=None, help=chat_help)
    for name, (kind, default, help_) in CAUSAL_ONLY.items():
        shown = "" if default is None else f"; default: {default}"
        causal.add_argument(f"--{name}", type=kind, help=f"{help_}{shown}")
    masked = parser.add_argument_group("masked language models")
    for name, (kind, default, help_) in MASKED_ONLY.items():
        masked.add_argument(f"--{name}", type=kind, help=f"{help_}; default: {default}")
    sampling = parser.add_argument_group("sampling")
    for field in dataclasses.fields(Sampling):
        help_ = f"{SAMPLING_HELP[field.name]}; default: {field.default}"
        sampling.add_argument(f"--{field.name}", type=type(field.default), help=help_)
    return parser


def main(argv: list[str]) -> None:
    """Continues or answers a prompt with a run's checkpoint, fills in [MASK]s, or writes second lines of couplets."""
    arguments = flags().parse_args(argv)
    from flash_lm.cli.generate_output import render_output
    from flash_lm.runs.hosts import is_first
    from flash_lm.runs.lost_hosts import report_lost_host

    prompt, asked = read_prompt(arguments.prompt, arguments.prompt_file), vars(arguments)
    asked["workdir"], asked["mesh"] = parse_run(arguments)
    # All hosts compute; the first one prints.
    with report_lost_host():
        for text in render_output(prompt, asked):  # on every host
            if is_first():
                print(text, end="", flush=True)


def read_prompt(prompt: str | None, path: pathlib.Path | None) -> str:
    """Reads the prompt from the flag, the file or standard input, without the final newline.

    Raises:
        InputError: there is no such file, or it is not UTF-8 text.
    """
    if prompt is not None:
        return prompt
    try:
        data = path.read_bytes() if path else sys.stdin.buffer.read()
        return data.decode("utf-8-sig").removesuffix("\n")
    except OSError as error:
        raise InputError(f"cannot read the prompt from {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt is not UTF-8: byte {error.start} is {error.object[error.start]:#x}") from None


if __name__ == "__main__":
    run(main, flags)
