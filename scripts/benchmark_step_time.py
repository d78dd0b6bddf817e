"""What a training step costs, by family and length: time, memory, and the share of the device's peak rate.

    python scripts/benchmark_step_time.py --families="transformer_plus_plus flash" --lengths="512 2048 8192" \
        --size=small --out=results/step_time [--config.model.chunk_size=256 …]

A step is forward, backward and update of the same number of tokens at each length, on tokens that lie on the device.
Families take turns; on a CPU the peak is a matrix product of float32 that takes turns with them.
"""

import argparse
import dataclasses
import logging
import os
import pathlib
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from flash_lm.analysis.peaks import peak_flops
from flash_lm.analysis.provenance import config_hash, provenance
from flash_lm.analysis.results import Line, append_jsonl
from flash_lm.analysis.rounds import ROUNDS, Cell, take_turns, timed
from flash_lm.analysis.step_time import BASELINE, plot_step_times, step_time_tables
from flash_lm.command import load_config, run
from flash_lm.config import DTYPES, TASKS, Config, parse
from flash_lm.errors import InputError
from flash_lm.models.families import FAMILIES
from flash_lm.training.bare_step import BareStep, completed

SIZES = {"tiny": "configs/tiny.py", "small": "configs/small.py", "base": "configs/flash_base.py"}
_PRODUCT = 2048  # rows and columns of the matrices whose product is a CPU's peak


def cell_config(config: ConfigDict, family: str, length: int, arguments: argparse.Namespace) -> Config:
    """Of one cell: a family, rows of `length` tokens, all of the step's in one batch."""
    changed: Any = config.copy_and_resolve_references()
    changed.task = arguments.task
    changed.model.update(family=family, max_length=length, dtype=arguments.dtype)
    changed.data.update(length=length, tokens_per_batch=arguments.tokens_per_step)
    changed.train.accumulate = 1
    return completed(parse(changed))


def measure(config: ConfigDict, families: list[str], length: int, arguments: argparse.Namespace) -> list[Line]:
    """One line a family, of one length."""
    say = lambda text: print(f"length {length}: {text}", flush=True)
    cells, lines = {}, {}
    for family in families:
        try:
            step = BareStep(cell_config(config, family, length, arguments))
        except jax.errors.JaxRuntimeError as error:
            lines[family] = does_not_fit(error)
            continue
        lines[family] = {
            "params": step.parameters,
            "compile_s": step.compile_s,
            "temp_bytes": step.temp_bytes,
            "peak_bytes": step.peak_bytes,
            "model_flops": step.model_flops,
            "config_hash": config_hash(dataclasses.asdict(step.config)),
        }
        say(f"{family} compiled in {step.compile_s:.1f} s, {step.peak_bytes / 1e6:,.0f} MB")
        room = memory_left()
        if room is not None and step.peak_bytes > room:
            lines[family]["does_not_fit"] = f"{step.peak_bytes / 1e9:.1f} GB of {room / 1e9:.1f} GB that are free"
            continue
        try:
            step.start()
            cells[family] = Cell.warmed(family, timed(step.step))
        except jax.errors.JaxRuntimeError as error:
            lines[family] |= does_not_fit(error)
    device = jax.devices()[0]
    product = Cell.warmed("matrix product", timed(matrix_product()))
    take_turns([*cells.values(), product], arguments.rounds, say)
    if device.platform == "cpu":
        peak = 2 * _PRODUCT**3 / (product.median_ms / 1000)
    else:
        peak = peak_flops(device.device_kind, arguments.dtype)
    base = cells.get(BASELINE)
    for family, cell in cells.items():
        rate = lines[family]["model_flops"] / (cell.median_ms / 1000)
        lines[family] |= {
            "median_ms": cell.median_ms,
            "iqr_ms": cell.iqr_ms,
            "rounds": len(cell.times_ms),
            "tokens_per_s": arguments.tokens_per_step / (cell.median_ms / 1000),
            "model_flops_per_s": rate,
            "peak_flops_per_s": peak or "unknown",
            "peak_fraction": rate / peak if peak else "unknown",
        }
        if base is not None:
            lines[family]["speedup"] = base.median_ms / cell.median_ms
    about = {
        "length": length,
        "task": arguments.task,
        "size": arguments.size,
        "dtype": arguments.dtype,
        "tokens_per_step": arguments.tokens_per_step,
    }
    where = provenance(device.device_kind)
    return [{"family": family} | about | line | where for family, line in lines.items()]


def matrix_product():
    """A product of square float32 matrices, compiled."""
    a = jax.random.normal(jax.random.key(0), (_PRODUCT, _PRODUCT))
    product = jax.jit(lambda a: a @ a)
    return lambda: jax.block_until_ready(product(a))


def memory_left() -> int | None:
    """Bytes that are free on the device; None: it does not tell."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None


def does_not_fit(error: Exception) -> Line:
    """What is told of a cell that ran out of memory; any other error goes on up."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return {"does_not_fit": str(error).splitlines()[0][:200]}


def main(argv: list[str]) -> None:
    """Appends to steps.jsonl in OUT after each length, and at the end writes table.md and step_time.png."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--families", default=" ".join(FAMILIES), help="between blanks; default: all")
    parser.add_argument("--lengths", default="512 1024 2048 4096 8192", help="of the rows, between blanks")
    parser.add_argument("--tokens_per_step", type=int, default=8192)
    parser.add_argument("--task", default="causal_lm", choices=TASKS)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder")
    arguments, overrides = parser.parse_known_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # which keys a family ignores, once a cell
    families, config = arguments.families.split(), load_config(SIZES[arguments.size], overrides)
    try:
        lengths = [int(word) for word in arguments.lengths.split()]
    except ValueError:
        raise InputError(f"--lengths={arguments.lengths} must be whole numbers between blanks") from None
    for length in lengths:
        for family in families:  # what is wrong is told before hours of measuring
            cell_config(config, family, length, arguments)
    file, lines, start = arguments.out / "steps.jsonl", [], time.perf_counter()
    file.unlink(missing_ok=True)
    for done, length in enumerate(lengths, start=1):
        here = measure(config, families, length, arguments)
        append_jsonl(file, here)
        lines += here
        each = (time.perf_counter() - start) / done
        print(f"{done} of {len(lengths)} lengths, about {each * (len(lengths) - done) / 60:.0f} min left", flush=True)
    text = step_time_tables(lines)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    plot_step_times(lines, arguments.out / "step_time.png")
    print(text)


if __name__ == "__main__":
    run(main)
