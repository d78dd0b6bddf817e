"""Memory and moved bytes of a training step, from the program that XLA compiles for a chip that need not be here.

    pip install libtpu 'jax[cuda12]'    # the compilers for TPUs and for NVIDIA GPUs
    python -m benchmarks.programs --chip=H200 --models="flash transformer_plus_plus" --length=2048 --tokens=65536 \
        --out=benchmarks/programs/results/h200.jsonl --config.model.remat=none

A model is a preset of --config, and perhaps keys: mamba2+ssd.chunk_size=256. Without --length and --tokens it has the
batch of its preset, in as few microbatches as fit. One line each in a file that replaces that of an older run: bytes of
state and temporary arrays, and bytes that the step reads from and writes to the device's memory, by kind of work.
"""

import argparse
import pathlib
import time
from typing import Any

import jax

from benchmarks.lib.moved_bytes import count_moved_bytes
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import positive, split_words
from flash_lm.config.experiment import Config, parse
from flash_lm.config.overrides import variant
from flash_lm.errors import InputError
from flash_lm.families.family import complete_config
from flash_lm.models.facts import training_flops
from flash_lm.ops.implementations import recorded
from flash_lm.ops.token_slices import slice_tokens
from flash_lm.runs.jsonl import Line
from flash_lm.timing.cell_lines import CellLines
from flash_lm.timing.machine import machine
from flash_lm.training.chips import CHIPS
from flash_lm.training.compiled_step import lower_step, program_bytes
from flash_lm.training.compiler_options import compile_for
from flash_lm.training.microbatches import fill_microbatches
from flash_lm.training.plan import parse_target
from flash_lm.training.setup import build_setup
from flash_lm.training.sharding import make_mesh


def model_config(base: str, word: str, overrides: list[str], length: int | None, tokens: int | None) -> Config:
    """Returns the config of one model; keys in the word win.

    Args:
        base: a config with presets.
        word: a preset, perhaps with keys.
        overrides: the command's.
        length: tokens of a sequence; None: the preset's.
        tokens: of a step without microbatches; None: the preset's, in as few microbatches as fit.
    """
    preset, *_ = word.split("+")
    config: Any = load_config(f"{base}:{preset}", overrides)
    if length is not None:
        config.model.max_length = config.data.length = length
    if tokens is not None:
        config.data.tokens_per_batch, config.train.accumulate = tokens, 1
    if config.model.vocab_size is None:
        config.model.vocab_size = config.data.vocab_size  # a tokenizer would have as many words
    return complete_config(parse(variant(config, word)[1]))


def measure(config: Config, chip: str) -> tuple[Line, str]:
    """Compiles the step for one chip; returns a line and the program's text."""
    target = parse_target(chip)
    if not target.devices:
        raise InputError(target.why)
    setup, _ = fill_microbatches(build_setup(config, make_mesh(config.mesh, [*target.devices])), target.memory)
    config, start = setup.config, time.perf_counter()
    with jax.set_mesh(setup.mesh), recorded() as implementations:
        program: Any = compile_for(lower_step(setup), target.devices[0])
    memory, text = program.memory_analysis(), program.as_text()
    tokens, length = config.data.tokens_per_batch, config.data.length
    # If few tokens are targets, the number of slices of a microbatch's loss depends on the data: all of them.
    chunk = config.train.loss_chunk or slice_tokens(setup.model.config.vocab_size, few_targets=True)
    slices = -(-tokens // config.train.microbatches // chunk) if config.few_targets else None
    moved = count_moved_bytes(text, unknown_trips=slices)
    flops = training_flops(setup.model.abstract, tokens, length)
    seconds = {"flops": flops / CHIPS[chip].peaks[config.model.dtype] / 1e12}
    seconds["bytes"] = sum(moved.values()) / CHIPS[chip].bandwidth / 1e9
    line: Line = {
        "family": config.model.label,
        "parameters": setup.model.parameter_count(),
        "length": length,
        "tokens_a_step": tokens,
        "microbatches": config.train.microbatches,
        "dtype": config.model.dtype,
        "remat": config.model.remat,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": program_bytes(program),
        "device_bytes": int(CHIPS[chip].memory * 1e9),
        "moved_bytes": sum(moved.values()),
        **{f"moved_bytes_{kind}": size for kind, size in moved.items()},
        "model_flops": flops,
        **{f"least_ms_{name}": 1000 * bound for name, bound in seconds.items()},
        "compile_s": time.perf_counter() - start,
        **implementations.line(),
    }
    return line, text


def main(argv: list[str]) -> None:
    """Writes one JSON line per model to OUT."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=main.__doc__)
    parser.add_argument("--config", default="configs/base_110m.py", help="a config with presets")
    parser.add_argument("--chip", default="H200", choices=list(CHIPS), help="to compile for")
    parser.add_argument("--models", default="flash transformer_plus_plus", help="presets, each perhaps with +KEY=VALUE")
    parser.add_argument("--length", type=positive, help="tokens of a sequence")
    parser.add_argument("--tokens", type=positive, help="tokens of a step")
    parser.add_argument("--text", type=pathlib.Path, help="a folder for the text of each program")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    about = machine()
    lines = CellLines(arguments.out, "model")
    for word in split_words(arguments.models):
        config = model_config(arguments.config, word, overrides, arguments.length, arguments.tokens)
        line, text = measure(config, arguments.chip)
        lines.put({"config": arguments.config, "model": word, "chip": arguments.chip} | line | about)
        a_token = line["moved_bytes"] / line["tokens_a_step"] / 1e3
        print(
            f"{word}: {line['peak_bytes'] / 1e9:.1f} GB, moves {line['moved_bytes'] / 1e9:.0f} GB, {a_token:.0f} KB a "
            f"token: {line['least_ms_bytes']:.0f} ms at the memory's rate, {line['least_ms_flops']:.0f} ms at the peak "
            f"of the products",
            flush=True,
        )
        if arguments.text:
            arguments.text.mkdir(parents=True, exist_ok=True)
            (arguments.text / f"{word}.txt").write_text(text)


if __name__ == "__main__":
    run(main)
