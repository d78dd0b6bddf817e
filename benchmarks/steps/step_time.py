"""Measures a training step by family and length: time, memory, and the share of the device's peak rate.

    python -m benchmarks.steps.step_time --families="transformer_plus_plus flash" --lengths="512 2048 8192" \
        --size=small --out=benchmarks/steps/results/papers [--config.model.chunks.size=256 …]

A step is forward, backward and update of the same number of tokens at each length, on tokens that are on the device.
Families take turns. On a CPU the peak is a matrix product that takes turns with them. A family may have other keys, as
in flash+kernels=xla+train.loss_chunk=8192, and may also be listed without them.
"""

import argparse
import concurrent.futures
import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.steps.report import BASELINE, plot_step_times, step_time_tables
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import parse_integers, positive
from flash_lm.config.experiment import Config
from flash_lm.config.model import DTYPES
from flash_lm.config.overrides import variant
from flash_lm.config.registry import TASKS
from flash_lm.errors import InputError
from flash_lm.families.family import families_with_form
from flash_lm.report.figure import can_draw
from flash_lm.runs.jsonl import Line
from flash_lm.runs.provenance import config_hash
from flash_lm.timing.bare_step import BareStep, step_config
from flash_lm.timing.cell_lines import CellLines
from flash_lm.timing.machine import machine
from flash_lm.timing.turns import ROUNDS, Cell, make_turn, take_turns
from flash_lm.training.chips import peak_flops
from flash_lm.training.device import free_memory

Keep = Callable[[str, Line], None]  # called with a family and what its line says besides what it said before
SIZES = {  # configs by the name of a size
    "tiny": "tiny",
    "small": "small",
    "base": "flash_base",
    "copy": "copy",
}
PRODUCT = 2048  # rows and columns of the matrices whose product is a CPU's peak
# Keys that the flags set, see `step_config`.
FLAG_KEYS = (
    "task",
    "model.family",
    "model.max_length",
    "model.dtype",
    "data.length",
    "data.tokens_per_batch",
    "train.accumulate",
)


class OutOfTimeError(Exception):
    """The time limit of --seconds is over."""


def compile_steps(
    configs: dict[str, Config], log: Callable[[str], None], keep: Keep, check_time: Callable[[], None]
) -> dict[str, BareStep]:
    """Compiles the steps; returns those that compile, by family, and keeps the facts about each, or why it failed."""
    steps = {}
    # Each compilation keeps one core busy, and the cores of a small machine have two threads each.
    pool = concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2))

    def compile_one(config: Config) -> BareStep:
        check_time()
        return BareStep(config)

    compiling = {family: pool.submit(compile_one, config) for family, config in configs.items()}
    for family, config in configs.items():
        try:
            step = steps[family] = compiling[family].result()
        except Exception as error:  # any failure of one variant on this machine; the others continue
            line = failure_line(error)
            keep(family, line)
            log(f"{family}: {next(iter(line.values()))}")
            continue
        keep(
            family,
            {
                "params": step.parameters,
                "compile_s": step.compile_s,
                "temp_bytes": step.temp_bytes,
                "peak_bytes": step.peak_bytes,
                "model_flops": step.model_flops,
                "kernels": step.kernels,
                "config_hash": config_hash(dataclasses.asdict(config)),
                **step.implementations.line(),
            },
        )
        log(f"{family} compiled in {step.compile_s:.1f} s, {step.peak_bytes / 1e6:,.0f} MB")
    return steps


def warm_up(steps: dict[str, BareStep], keep: Keep, check_time: Callable[[], None]) -> dict[str, Cell]:
    """Warms up the steps that fit into memory together: all states stay in memory while one cell takes its turn."""
    cells, room, states, largest = {}, free_memory(), 0, 0
    for family, step in steps.items():
        state = step.peak_bytes - step.temp_bytes
        needed = states + state + max(largest, step.temp_bytes)
        if room is not None and needed > room:
            free = f"{room / 1e9:.1f} GB are free"
            keep(family, {"does_not_fit": f"{needed / 1e9:.1f} GB with those before it, {free}"})
            continue
        try:
            check_time()
            step.start()
            cells[family] = Cell.warm_up(family, make_turn(step.step))
        except (jax.errors.JaxRuntimeError, OutOfTimeError) as error:
            keep(family, failure_line(error))
            continue
        states, largest = states + state, max(largest, step.temp_bytes)
    return cells


def measure(
    configs: dict[str, Config],
    rounds: int,
    log: Callable[[str], None],
    keep: Keep,
    check_time: Callable[[], None] = lambda: None,
) -> None:
    """Measures each family with the same length, precision and number of tokens.

    Args:
        configs: configs by family.
        rounds: see `take_turns`.
        log: called with the progress.
        keep: called with what is known of a family: after it is compiled, and after each of its turns.
        check_time: raises OutOfTimeError when nothing more may be started.
    """
    # Compile all steps, then time them in turn; on a CPU a large product gives the peak rate.
    steps = compile_steps(configs, log, keep, check_time)
    cells, device, some = warm_up(steps, keep, check_time), jax.devices()[0], next(iter(configs.values()))
    on_cpu = device.platform == "cpu"
    product = [Cell.warm_up("matrix product", make_turn(matrix_product(some.model.dtype)))] if on_cpu else []

    def keep_times() -> None:
        peak = 2 * PRODUCT**3 / (product[0].median_ms / 1000) if on_cpu else None
        peak = peak or peak_flops(device.device_kind, some.model.dtype)
        base = cells.get(BASELINE)
        for family, cell in cells.items():
            if cell.times_ms:
                speedup = {"speedup": base.median_ms / cell.median_ms} if base and base.times_ms else {}
                keep(family, _rates(cell, steps[family].model_flops, some.data.tokens_per_batch, peak) | speedup)

    take_turns([*product, *cells.values()], rounds, log, keep_times)


def _rates(cell: Cell, model_flops: float, tokens: int, peak: float | None) -> Line:
    rate = model_flops / (cell.median_ms / 1000)
    return {
        "median_ms": cell.median_ms,
        "iqr_ms": cell.iqr_ms,
        "turns": len(cell.times_ms),
        "tokens_per_s": tokens / (cell.median_ms / 1000),
        "model_flops_per_s": rate,
        "peak_flops_per_s": peak or "unknown",
        "peak_fraction": rate / peak if peak else "unknown",
    }


def matrix_product(dtype: str) -> Callable[[], jax.Array]:
    """Returns a compiled product of square matrices with a float32 result."""
    a = jax.random.normal(jax.random.key(0), (PRODUCT, PRODUCT), dtype)
    product = jax.jit(lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.float32))
    return lambda: jax.block_until_ready(product(a))


def failure_line(error: Exception) -> Line:
    """Returns the line of a cell that ran out of memory or time, or failed."""
    if isinstance(error, OutOfTimeError):
        return {"skipped": str(error)}
    key = "does_not_fit" if "RESOURCE_EXHAUSTED" in str(error) else "failed"
    return {key: f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def _check_flag_keys(words: list[str]) -> None:
    """Refuses keys that the flags set, as overrides or in the name of a variant: they would have no effect."""
    keys = [*FLAG_KEYS, *(key.removeprefix("model.") for key in FLAG_KEYS)]
    given = lambda word: any(word.startswith(f"--config.{key}=") or f"+{key}=" in word for key in keys)
    if misplaced := [word for word in words if given(word)]:
        raise InputError(f"{', '.join(misplaced)}: use this program's flags instead, see --help")


def main(argv: list[str]) -> None:
    """Writes a line of steps.jsonl in OUT after each turn of its cell, and at the end table.md and step_time.png."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--families",
        default="",
        help="separated by spaces, each may have +key=value; default: all that have a form for the task",
    )
    parser.add_argument(
        "--lengths", default="512 1024 2048 4096 8192", help="sequence lengths, separated by spaces or commas"
    )
    parser.add_argument("--tokens_per_step", type=int, default=8192)
    parser.add_argument("--task", default="causal_lm", help="name of a task")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--seconds", type=positive, help="after which nothing is compiled or begun")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments, overrides = parser.parse_known_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides the keys that a family ignores
    lengths, families = parse_integers(arguments.lengths), arguments.families.split()
    _check_flag_keys([*overrides, *families])
    config = load_config(SIZES[arguments.size], overrides)
    families = families or families_with_form(TASKS[arguments.task].causal)
    # Reports all errors before anything is measured.
    step = {key: getattr(arguments, key) for key in ("task", "dtype", "tokens_per_step")}
    variants = {word: variant(config, word) for word in families}
    configs = {
        n: {word: step_config(changed, family, n, **step) for word, (family, changed) in variants.items()}
        for n in lengths
    }
    about = step | {"size": arguments.size} | machine()
    results, start = CellLines(arguments.out / "steps.jsonl", "family", "length"), time.perf_counter()

    def check_time() -> None:
        if arguments.seconds and time.perf_counter() - start > arguments.seconds:
            raise OutOfTimeError(f"--seconds={arguments.seconds} were over")

    for length in lengths:
        known: dict[str, Line] = {}

        def keep(family: str, line: Line, known=known, length=length) -> None:
            known[family] = known.get(family, {}) | line
            results.put({"family": family, "length": length} | known[family] | about)

        log = lambda text, n=length: print(f"length {n}: {text}", flush=True)
        measure(configs[length], arguments.rounds, log, keep, check_time)
    lines = results.lines
    if skipped := [f"{line['family']} at {line['length']}" for line in lines if "skipped" in line]:
        print(f"not measured because of --seconds={arguments.seconds}: {', '.join(skipped)}")
    text = step_time_tables(lines)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if can_draw():
        plot_step_times(lines, arguments.out / "step_time.png")


if __name__ == "__main__":
    run(main)
