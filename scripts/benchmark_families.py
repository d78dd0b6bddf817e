"""All families at one small shape: parameters, forward and backward time and memory by length, decode-state bytes.

    python scripts/benchmark_families.py --out=results/families [--config.model.num_heads=4 …]

Families take turns, so that a drift of the machine hits all alike. Each step has the same number of tokens.
"""

import argparse
import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from flash_lm import build_model
from flash_lm.analysis.results import Line, write_jsonl
from flash_lm.analysis.table import markdown_table
from flash_lm.command import load_config, run
from flash_lm.config import parse_model
from flash_lm.errors import InputError
from flash_lm.models.families import FAMILIES, complete
from flash_lm.ops.cross_entropy import cross_entropy
from flash_lm.training.state import ModelFunction

CAPACITIES = (1024, 65536)
BASELINE = "transformer_plus_plus"


@dataclasses.dataclass
class Cell:
    """One family at one length, compiled."""

    family: str
    length: int
    compiled: Any
    arguments: tuple
    compile_s: float
    times_ms: list[float] = dataclasses.field(default_factory=list)

    def turn(self) -> float:
        """Runs once; milliseconds."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        return 1000 * (time.perf_counter() - start)


def compile_cell(model: ModelFunction, length: int, tokens: int, loss_chunk: int) -> Cell:
    """Loss and gradients of tokens / length rows."""

    def loss(params, inputs_BxL):
        bound = model.bind(params)
        targets_BxL, ones_BxL = jnp.roll(inputs_BxL, -1, axis=1), jnp.ones(inputs_BxL.shape)
        return cross_entropy(bound.features(inputs_BxL), bound.unembedding(), targets_BxL, ones_BxL, loss_chunk)

    inputs_BxL = jax.random.randint(jax.random.key(0), (tokens // length, length), 0, model.config.vocab_size)
    params = jax.jit(model.init)()
    start = time.perf_counter()
    compiled = jax.jit(jax.value_and_grad(loss)).lower(params, inputs_BxL).compile()
    return Cell(model.config.family, length, compiled, (params, inputs_BxL), time.perf_counter() - start)


def with_family(config: ConfigDict, family: str, **changes: Any) -> ConfigDict:
    """The model's config as another family of the same shape."""
    changed = config.copy_and_resolve_references()
    changed.update(family=family, **changes)
    return changed


def state_bytes(config: ConfigDict, family: str, capacity: int) -> int:
    """Of the decode state of one row."""
    changed = with_family(config, family, max_length=capacity, causal=True)
    shapes = nnx.eval_shape(lambda: build_model(changed, rngs=nnx.Rngs(0)).init_state(1, capacity))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def measure(
    config: ConfigDict, families: list[str], lengths: list[int], tokens: int, rounds: int, loss_chunk: int
) -> list[Line]:
    """One flat line a family and length; `config`: of the model."""
    lines = []
    for length in lengths:
        cells = []
        for family in families:
            completed = complete(parse_model(with_family(config, family)))
            cells.append(compile_cell(ModelFunction(completed, seed=0), length, tokens, loss_chunk))
            cells[-1].turn()  # warm-up
            print(f"{length} {family}: compiled in {cells[-1].compile_s:.1f} s", flush=True)
        for i in range(rounds):
            for cell in cells:
                cell.times_ms.append(cell.turn())
            print(f"{length}: round {i + 1} of {rounds}", flush=True)
        base = next(cell for cell in cells if cell.family == BASELINE)
        for cell in cells:
            temporary = [x.compiled.memory_analysis().temp_size_in_bytes for x in (cell, base)]
            median = statistics.median(cell.times_ms)
            quartiles = statistics.quantiles(cell.times_ms, n=4) if rounds > 1 else [median] * 3
            lines.append(
                {
                    "family": cell.family,
                    "parameters": sum(x.size for x in jax.tree.leaves(cell.arguments[0])),
                    "length": length,
                    "rows": tokens // length,
                    "forward_backward_ms": median,
                    "iqr_ms": quartiles[2] - quartiles[0],
                    "time_ratio": median / statistics.median(base.times_ms),
                    "temporary_bytes": temporary[0],
                    "memory_ratio": temporary[0] / temporary[1],
                    "compile_s": cell.compile_s,
                    "rounds": rounds,
                    "device": jax.devices()[0].device_kind,
                    "jax": jax.__version__,
                }
            )
    return lines


def wide_table(lines: list[Line], lengths: list[int]) -> str:
    """One row a family, one column a length for each of time, memory and their ratios to the baseline."""
    columns = {"family": ("family", "{}"), "parameters": ("parameters", "{:,}")}
    for length in lengths:
        columns[f"ms at {length}"] = (f"ms {length}", "{:,.0f}")
        columns[f"× at {length}"] = (f"time {length}", "{:.2f}")
    for length in lengths:
        columns[f"MB at {length}"] = (f"MB {length}", "{:,.0f}")
        columns[f"MB × at {length}"] = (f"memory {length}", "{:.2f}")
    rows = {}
    for line in lines:
        length, row = line["length"], rows.setdefault(line["family"], dict(line))
        row[f"ms {length}"], row[f"time {length}"] = line["forward_backward_ms"], line["time_ratio"]
        row[f"MB {length}"], row[f"memory {length}"] = line["temporary_bytes"] / 1e6, line["memory_ratio"]
    return markdown_table(list(rows.values()), columns)


def main(argv: list[str]) -> None:
    """Writes times.jsonl, states.jsonl and table.md to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--families", default=" ".join(FAMILIES), help="between blanks")
    parser.add_argument("--lengths", default="512 2048 8192", help="between blanks")
    parser.add_argument("--tokens", type=int, default=8192, help="a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    families, lengths = arguments.families.split(), [int(x) for x in arguments.lengths.split()]
    if BASELINE not in families or any(arguments.tokens % length for length in lengths):
        raise InputError(f"--families needs {BASELINE}, and each of --lengths must divide --tokens={arguments.tokens}")
    config: Any = load_config(arguments.config, overrides)
    model = config.model
    model.update(max_length=max(lengths), vocab_size=model.vocab_size or 256)
    states = [
        {"family": name, **{f"bytes at {n}": state_bytes(model, name, n) for n in CAPACITIES}} for name in families
    ]
    lines = measure(model, families, lengths, arguments.tokens, arguments.rounds, config.train.loss_chunk)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.out / "times.jsonl", lines)
    write_jsonl(arguments.out / "states.jsonl", states)
    by_capacity = {"family": ("family", "{}"), **{f"{n:,}": (f"bytes at {n}", "{:,}") for n in CAPACITIES}}
    text = "\n\n".join(
        (
            f"Forward and backward of {arguments.tokens} tokens in float32: {model.num_layers} layers of "
            f"{model.model_dim}, {model.vocab_size} words, median of {arguments.rounds} turns on {lines[0]['device']}; "
            f"× is of {BASELINE}; MB are temporary memory.",
            wide_table(lines, lengths),
            "Bytes of the decode state of one row, by capacity.",
            markdown_table(states, by_capacity),
        )
    )
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run(main)
