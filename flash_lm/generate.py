"""python -m flash_lm.generate --workdir=runs/x --prompt="…" [--max_tokens=200 --temperature=0.8 --top_p=0.95 …]."""

import argparse
import dataclasses
import json
import pathlib
import sys

from flash_lm.command import run
from flash_lm.config import DTYPES
from flash_lm.errors import InputError
from flash_lm.inference.fill_in import Filler
from flash_lm.inference.generation import Generator
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.trained_model import TrainedModel, load_model


def main(argv: list[str]) -> None:
    """Continues a prompt with the newest checkpoint of a run, or fills in the [MASK]s of a masked language model."""
    parser = argparse.ArgumentParser(prog="python -m flash_lm.generate", description=main.__doc__)
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="folder of the run")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="default: standard input")
    source.add_argument("--prompt_file", type=pathlib.Path, help="a UTF-8 file that is the prompt")
    parser.add_argument("--max_tokens", type=int, default=200)
    defaults = Sampling()
    for field in dataclasses.fields(Sampling):
        default = getattr(defaults, field.name)
        parser.add_argument(f"--{field.name}", type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=1, help="of the same prompt, all at once")
    parser.add_argument("--continuation", help="score this text after the prompt instead of generating one")
    parser.add_argument("--candidates", type=int, default=5, help="a mask")
    parser.add_argument("--json", action="store_true", help="with tokens and log-probabilities, an object a line")
    parser.add_argument("--dtype", choices=DTYPES, help="of parameters and computation; default: as trained")
    parser.add_argument("--mesh", default="-1,1,1", help="devices along data, fsdp and tensor")
    arguments = parser.parse_args(argv)
    sampling = Sampling(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sampling)})
    try:
        mesh_shape = tuple(int(word) for word in arguments.mesh.split(","))
    except ValueError:
        raise InputError(f"--mesh={arguments.mesh} must be three whole numbers, such as 1,2,4") from None
    trained = load_model(arguments.workdir, dtype=arguments.dtype, mesh_shape=mesh_shape)
    prompt = read_prompt(arguments)
    if trained.config.task == "masked_lm":
        fill_in(trained, prompt, arguments)
    else:
        generate(trained, prompt, sampling, arguments)


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt of the flag, the file or standard input; the last line's end is no part of it."""
    if arguments.prompt is not None:
        return arguments.prompt
    path = arguments.prompt_file
    try:
        data = path.read_bytes() if path else sys.stdin.buffer.read()
        return data.decode().removesuffix("\n")
    except OSError as error:
        raise InputError(f"cannot read the prompt from {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt is no UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from None


def generate(trained: TrainedModel, prompt: str, sampling: Sampling, arguments: argparse.Namespace) -> None:
    """Prints text as it comes, or JSON, or the score of a given continuation."""
    generator = Generator(trained)
    if arguments.samples < 1:
        raise InputError(f"--samples={arguments.samples} must be 1 or more")
    if arguments.continuation is not None:
        (scored,) = generator.score([prompt], [arguments.continuation])
        total = sum(scored.log_probs)
        print(json.dumps(dataclasses.asdict(scored)) if arguments.json else f"log-probability {total:.4f} nats")
    elif arguments.samples == 1 and not arguments.json:
        texts = generator.stream(prompt, arguments.max_tokens, sampling, arguments.seed)
        print(prompt, end="", flush=True)
        for text in texts:
            print(text, end="", flush=True)
        print()
    else:
        prompts = [prompt] * arguments.samples
        for found in generator.generate(prompts, arguments.max_tokens, sampling, arguments.seed):
            print(json.dumps(dataclasses.asdict(found)) if arguments.json else f"{prompt}{found.text}\n")


def fill_in(trained: TrainedModel, prompt: str, arguments: argparse.Namespace) -> None:
    """Prints the filled text and the candidates of each mask."""
    (found,) = Filler(trained)([prompt], arguments.candidates)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    print(found.text)
    for i, candidates in enumerate(found.masks):
        print(f"mask {i + 1}: " + ", ".join(f"{c.text!r} {c.probability:.3f}" for c in candidates))


if __name__ == "__main__":
    run(main)
