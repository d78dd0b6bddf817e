"""Measures a training step by family and length: time, memory, and the share of the device's peak rate.

    python -m benchmarks.steps.step_time --families="transformer_plus_plus flash" --lengths="512 2048 8192" \
        --size=small --out=benchmarks/steps/results/papers [--config.model.chunks.size=256 …]

A step is forward, backward and update of the same number of tokens at each length, on tokens that are on the device.
Families take turns. On a CPU the peak is a matrix product that takes turns with them. A family may have other keys, as
in flash+kernels=xla+remat=full, and may also be listed without them.
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

from benchmarks.lib.bare_step import BareStep, step_config
from benchmarks.lib.peaks import peak_flops
from benchmarks.lib.timing import ROUNDS, Cell, make_turn, take_turns
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
from flash_lm.runs.jsonl import Line, append_jsonl
from flash_lm.runs.provenance import config_hash, provenance
from flash_lm.training.device import free_memory

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


def compile_steps(
    configs: dict[str, Config], log: Callable[[str], None]
) -> tuple[dict[str, BareStep], dict[str, Line]]:
    """Compiles the steps; returns them by family, and a line of facts about each."""
    steps, lines = {}, {}
    # Each compilation keeps one core busy, and the cores of a small machine have two threads each.
    pool = concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2))
    compiling = {family: pool.submit(BareStep, config) for family, config in configs.items()}
    for family, config in configs.items():
        try:
            step = steps[family] = compiling[family].result()
        except Exception as error:  # any failure of one variant on this machine; the others continue
            lines[family] = failure_line(error)
            log(f"{family}: {next(iter(lines[family].values()))}")
            continue
        lines[family] = {
            "params": step.parameters,
            "compile_s": step.compile_s,
            "temp_bytes": step.temp_bytes,
            "peak_bytes": step.peak_bytes,
            "model_flops": step.model_flops,
            "kernels": step.kernels,
            "config_hash": config_hash(dataclasses.asdict(config)),
        }
        log(f"{family} compiled in {step.compile_s:.1f} s, {step.peak_bytes / 1e6:,.0f} MB")
    return steps, lines


def warm_up(steps: dict[str, BareStep], lines: dict[str, Line]) -> dict[str, Cell]:
    """Warms up the steps that fit into memory together: all states stay in memory while one cell takes its turn."""
    cells, room, states, largest = {}, free_memory(), 0, 0
    for family, step in steps.items():
        state = step.peak_bytes - step.temp_bytes
        needed = states + state + max(largest, step.temp_bytes)
        if room is not None and needed > room:
            lines[family]["does_not_fit"] = f"{needed / 1e9:.1f} GB with those before it, {room / 1e9:.1f} GB are free"
            continue
        try:
            step.start()
            cells[family] = Cell.warm_up(family, make_turn(step.step))
        except jax.errors.JaxRuntimeError as error:
            lines[family] |= failure_line(error)
            continue
        states, largest = states + state, max(largest, step.temp_bytes)
    return cells


def measure(configs: dict[str, Config], rounds: int, log: Callable[[str], None]) -> dict[str, Line]:
    """Measures each family with the same length, precision and number of tokens."""
    # Compile all steps, then time them in turn; on a CPU a large product gives the peak rate.
    steps, lines = compile_steps(configs, log)
    cells, device, some = warm_up(steps, lines), jax.devices()[0], next(iter(configs.values()))
    if device.platform == "cpu":
        product = Cell.warm_up("matrix product", make_turn(matrix_product(some.model.dtype)))
        take_turns([*cells.values(), product], rounds, log)
        peak = 2 * PRODUCT**3 / (product.median_ms / 1000)
    else:
        take_turns(list(cells.values()), rounds, log)
        peak = peak_flops(device.device_kind, some.model.dtype)
    # Rates, and speed relative to the baseline.
    for family, cell in cells.items():
        rate = lines[family]["model_flops"] / (cell.median_ms / 1000)
        lines[family] |= {
            "median_ms": cell.median_ms,
            "iqr_ms": cell.iqr_ms,
            "turns": len(cell.times_ms),
            "tokens_per_s": some.data.tokens_per_batch / (cell.median_ms / 1000),
            "model_flops_per_s": rate,
            "peak_flops_per_s": peak or "unknown",
            "peak_fraction": rate / peak if peak else "unknown",
        }
        if BASELINE in cells:
            lines[family]["speedup"] = cells[BASELINE].median_ms / cell.median_ms
    return lines


def matrix_product(dtype: str) -> Callable[[], jax.Array]:
    """Returns a compiled product of square matrices with a float32 result."""
    a = jax.random.normal(jax.random.key(0), (PRODUCT, PRODUCT), dtype)
    product = jax.jit(lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.float32))
    return lambda: jax.block_until_ready(product(a))


def failure_line(error: Exception) -> Line:
    """Returns the line of a cell that ran out of memory, or failed."""
    key = "does_not_fit" if "RESOURCE_EXHAUSTED" in str(error) else "failed"
    return {key: f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def main(argv: list[str]) -> None:
    """Appends to steps.jsonl in OUT after each length, and at the end writes table.md and step_time.png."""
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
    parser.add_argument("--seconds", type=positive, help="time limit: lengths that would end later are not started")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments, overrides = parser.parse_known_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides the keys that a family ignores
    if misplaced := [word for word in overrides if word.startswith(tuple(f"--config.{key}=" for key in FLAG_KEYS))]:
        raise InputError(f"{', '.join(misplaced)}: use this program's flags instead, see --help")
    config, lengths = load_config(SIZES[arguments.size], overrides), parse_integers(arguments.lengths)
    families = arguments.families.split() or families_with_form(TASKS[arguments.task].causal)
    # Reports all errors before anything is measured.
    step = {key: getattr(arguments, key) for key in ("task", "dtype", "tokens_per_step")}
    variants = {word: variant(config, word) for word in families}
    configs = {
        n: {word: step_config(changed, family, n, **step) for word, (family, changed) in variants.items()}
        for n in lengths
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, lines, start = arguments.out / "steps.jsonl", [], time.perf_counter()
    file.unlink(missing_ok=True)
    about = step | {"size": arguments.size} | provenance(jax.devices()[0].device_kind)
    for done, length in enumerate(lengths, start=1):
        measured = measure(
            configs[length], arguments.rounds, lambda text, n=length: print(f"length {n}: {text}", flush=True)
        )
        length_lines = [{"family": family, "length": length} | line | about for family, line in measured.items()]
        append_jsonl(file, length_lines)
        lines += length_lines
        spent = time.perf_counter() - start
        left = spent / done * (len(lengths) - done)
        print(f"{done} of {len(lengths)} lengths, about {left / 60:.0f} min left", flush=True)
        if left and arguments.seconds and spent + spent / done > arguments.seconds:
            print(f"not run because of --seconds={arguments.seconds}: lengths {', '.join(map(str, lengths[done:]))}")
            break
    text = step_time_tables(lines)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if can_draw():
        plot_step_times(lines, arguments.out / "step_time.png")


if __name__ == "__main__":
    run(main)
