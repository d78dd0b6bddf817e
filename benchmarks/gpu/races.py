"""Times our attention cores and flash-linear-attention's kernels, forward and backward, at the same shapes.

    python -m benchmarks.gpu.races --python=.venv-peers/bin/python --out=benchmarks/gpu/results/races

The shapes are those of flash-linear-attention's benchmark of its operators (benchmarks/ops/registry.py, SHAPE_CONFIGS),
and so are the distributions of gates. Ours are the cores of our families with their defaults, as XLA compiles them. A
core and its kernel are compared first, outputs and gradients, on one sequence: those that differ are not timed. Both
are in bfloat16, and take turns. Without a GPU theirs are the references next to their kernels, whose times mean
nothing: that only shows that the programs run.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import functools
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.lib.peers import add_python
from benchmarks.peers.speed import PeerError, ask, start_peer
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import positive, split_words
from flash_lm.config.experiment import parse_model
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete
from flash_lm.families.gla import GatedInputs
from flash_lm.layers.attention_core import Pair
from flash_lm.layers.context import Context
from flash_lm.layers.decayed_core import DecayedInputs
from flash_lm.ops.delta_rule import DeltaInputs
from flash_lm.ops.linear_attention import elu_plus_one
from flash_lm.ops.segments import whole_row
from flash_lm.report.markdown import markdown_table
from flash_lm.runs.jsonl import Line
from flash_lm.timing.cell_lines import CellLines
from flash_lm.timing.machine import machine, machines
from flash_lm.timing.turns import ROUNDS, Cell, make_turn, take_turns
from flash_lm.training.chips import peak_flops

WORKER = pathlib.Path(__file__).with_name("races_worker.py")
SHAPES = "4x2048x16x128 2x16384x16x128 1x8192x96x128"  # sequences × length × heads × width of a head
THREADS = 4  # of our programs that are compiled at the same time
CHECKED = 512  # most tokens of the sequence on which both are compared
AGREES = 4e-2  # relative distance: each side may be 2e-2 from exact in bfloat16, as in benchmarks/kernels
EPSILON = 1e-6  # in the length of a key, as in their kernel
COLUMNS = {
    "core": ("core", "{}"),
    "theirs": ("theirs", "{}"),
    "sequences × length × heads × width": ("shape", "{}"),
    "ours, ms": ("ours_ms", "{:.2f}"),
    "theirs, ms": ("theirs_ms", "{:.2f}"),
    "times as fast": ("speedup", "{:.2f}"),
    "our share of the peak": ("peak_fraction", "{}"),
    "on": ("machine", "{}"),
    "": ("not_compared", "{}"),
}
Arrays = Mapping[str, jax.Array]  # q, k, v, and perhaps g and beta, B×H×L×… or B×H×L


class Shape(NamedTuple):
    """The sizes of a race; keys and values have the same width."""

    sequences: int
    length: int
    heads: int
    width: int

    @classmethod
    def parse(cls, word: str) -> "Shape":
        """Reads 4x2048x16x128.

        Raises:
            InputError: it is something else.
        """
        numbers = word.split("x")
        if len(numbers) != len(cls._fields) or not all(number.isdecimal() and int(number) for number in numbers):
            raise InputError(f"--shapes: {word} must be sequences x length x heads x width, such as 4x2048x16x128")
        return cls(*map(int, numbers))

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Race(NamedTuple):
    """A core of ours and what it needs to compute what their kernel does.

    Attributes:
        family: the family whose core it is.
        inputs: q, k and the gates of a core, from those that their kernel takes; timed, as theirs does it, too.
        gates: how g and beta are made from normal values, and whether g has a value per channel.
    """

    family: str
    inputs: Callable[[Arrays], Any]
    gates: Mapping[str, tuple[Callable[[jax.Array], jax.Array], bool]] = {}


def _scaled(q: jax.Array) -> jax.Array:
    return (q / np.sqrt(q.shape[-1])).astype(q.dtype)


def _of_length_1(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + EPSILON)).astype(x.dtype)


def _retention_decay(heads: int) -> jax.Array:
    return jnp.asarray(np.log1p(-(2.0 ** -(5.0 + np.arange(heads)))), jnp.float32)[None, :, None]


_PER_TOKEN = (jax.nn.log_sigmoid, False)
RACES = {
    "gla": Race(
        "gla",
        lambda x: GatedInputs(_scaled(x["q"]), x["k"], x["g"]),
        {"g": (lambda x: jnp.maximum(jax.nn.log_sigmoid(x), -5.0), True)},
    ),
    "gated_delta": Race(
        "gated_deltanet",
        lambda x: DeltaInputs(_scaled(_of_length_1(x["q"])), _of_length_1(x["k"]), x["g"], x["beta"]),
        {"g": _PER_TOKEN, "beta": (jax.nn.sigmoid, False)},
    ),
    "retention": Race("retnet", lambda x: DecayedInputs(_scaled(x["q"]), x["k"], _retention_decay(x["q"].shape[1]))),
    "linear": Race("linear_transformer", lambda x: {"attention": Pair(x["q"], x["k"])}),
    "ssd": Race("mamba2", lambda x: DecayedInputs(_scaled(x["q"]), x["k"], x["g"]), {"g": _PER_TOKEN}),
}


def make_core(race: Race, shape: Shape) -> Any:
    """Returns the core of a family with its defaults and as many heads, without kernels of ours."""
    raw: Any = copy.deepcopy(load_config("configs/base.py", [])).model
    raw.update(family=race.family, model_dim=shape.heads * shape.width, num_heads=shape.heads, kernels="xla")
    raw.update(num_layers=1, max_length=shape.length, vocab_size=8, causal=True)
    core = FAMILIES[race.family].sublayers[0](complete(parse_model(raw)), rngs=nnx.Rngs(0)).core
    if race.family == "mamba2":
        core.shared_keys = False  # their kernel has keys of each head
    return core


def make_inputs(race: Race, shape: Shape, dtype: Any) -> Arrays:
    """Draws q, k, v, gates and a gradient of the output `do`; gates that enter an exponential stay float32."""
    names = ["q", "k", "v", "do", *race.gates]
    keys = dict(zip(names, jax.random.split(jax.random.key(0), len(names)), strict=True))
    rows = (shape.sequences, shape.heads, shape.length)
    arrays = {name: jax.random.normal(keys[name], (*rows, shape.width), dtype) for name in ("q", "k", "v", "do")}
    for name, (transform, per_channel) in race.gates.items():
        size = (*rows, shape.width) if per_channel else rows
        arrays[name] = transform(jax.random.normal(keys[name], size, jnp.float32))
    if race.family == "linear_transformer":  # positive, so that no denominator is near 0
        arrays |= {name: elu_plus_one(arrays[name]) for name in ("q", "k")}
    return arrays


def forward_and_backward(race: Race, shape: Shape) -> Callable[[Arrays], tuple[jax.Array, Arrays]]:
    """Returns our compiled function: outputs, and the gradients of all inputs."""
    core, segments = make_core(race, shape), whole_row(shape.length)
    if race.family == "linear_transformer":
        core.features = lambda x: x  # theirs takes the features, too
    context = Context(positions_BxL=segments.offsets_BxL, segments=segments, causal=True, packed=False)

    def both(arrays: Arrays) -> tuple[jax.Array, Arrays]:
        inputs = {name: x for name, x in arrays.items() if name != "do"}
        out, pull = jax.vjp(lambda x: core(race.inputs(x), x["v"], context), inputs)
        return out, pull(arrays["do"].astype(out.dtype))[0]

    return jax.jit(both)


@functools.cache
def compiled(name: str, shape: Shape) -> Callable[[Arrays], tuple[jax.Array, Arrays]]:
    """Returns our program of a race in bfloat16, compiled once."""
    arrays = jax.eval_shape(lambda: make_inputs(RACES[name], shape, jnp.bfloat16))
    return forward_and_backward(RACES[name], shape).lower(arrays).compile()


def compile_ahead(names: Sequence[str], shape: Shape, is_over: Callable[[], bool]) -> None:
    """Compiles our programs of some races at the same time, since that takes longer than the races themselves."""

    def compile_one(name: str, shape: Shape) -> None:
        # An error is reported by the race, which compiles again.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _ = None if is_over() else compiled(name, shape)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for name in names:
            for size in dict.fromkeys((_checked(shape), shape)):
                pool.submit(compile_one, name, size)


def _checked(shape: Shape) -> Shape:
    return shape._replace(sequences=1, length=min(shape.length, CHECKED))


def distance_from_theirs(name: str, shape: Shape, peer: subprocess.Popen) -> float:
    """Returns the largest relative distance of outputs and gradients from theirs, on one sequence.

    Raises:
        PeerError: theirs failed.
    """
    short = _checked(shape)
    arrays = make_inputs(RACES[name], short, jnp.bfloat16)
    out, gradients = compiled(name, short)(arrays)
    # Theirs have the heads after the tokens: B×L×H×….
    swapped = lambda x: np.asarray(jnp.swapaxes(x, 1, 2).astype(jnp.float32))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "inputs.npz"
        np.savez(file, allow_pickle=False, **{key: swapped(x) for key, x in arrays.items()})
        ask(peer, {"compute": name, "inputs": str(file), "outputs": f"{folder}/outputs.npz"})
        theirs = np.load(f"{folder}/outputs.npz")
        ours = {"out": out, **gradients}
        distances = [np.linalg.norm(swapped(ours[key]) - theirs[key]) / np.linalg.norm(theirs[key]) for key in theirs]
    return float(np.max(distances))


def time_ours(name: str, shape: Shape, calls: int) -> tuple[Cell, Line]:
    """Returns our warm cell of several calls, and a line about it."""
    race = RACES[name]
    function, arrays = compiled(name, shape), make_inputs(race, shape, jnp.bfloat16)
    jax.block_until_ready(function(arrays))
    cell = Cell.warm_up("ours", make_turn(lambda: jax.block_until_ready([function(arrays) for _ in range(calls)])))
    per_token = make_core(race, shape).flops_per_token(shape.length, True, shape.heads, shape.width, shape.width)
    return cell, {"flops": 3 * per_token * shape.sequences * shape.length}  # the backward pass has two of the three


def race_line(name: str, shape: Shape, peer: subprocess.Popen | None, rounds: int, calls: int) -> Line:
    """Returns a line with the times of both sides, or of ours alone and why they are not compared."""
    line: Line = {"core": name, "family": RACES[name].family, "shape": str(shape), **shape._asdict()}
    theirs, problem = None, "no interpreter for the peers: run `make peers`, or set --python"
    try:
        if peer is not None:
            line |= ask(peer, {"about": name})
            line["distance"] = distance_from_theirs(name, shape, peer)
            problem = f"they differ by {line['distance']:.2g}, where {AGREES} is allowed"
            if line["distance"] <= AGREES:  # also false for NaN
                ask(peer, {"build": name, "shape": list(shape), "calls": calls})
                theirs = Cell.warm_up("theirs", lambda: ask(peer, {"turn": 1})["ms"])
    except PeerError as error:
        theirs, problem = None, f"theirs: {error}"
    except jax.errors.JaxRuntimeError as error:
        problem = f"ours: {error}".splitlines()[0][:200]
    try:
        ours, about = time_ours(name, shape, calls)
    except jax.errors.JaxRuntimeError as error:  # such as no memory
        return line | {"not_compared": f"ours: {error}".splitlines()[0][:200]}
    take_turns([ours, theirs] if theirs else [ours], rounds)
    line |= about | {"ours_ms": ours.median_ms / calls}
    peak = peak_flops(jax.devices()[0].device_kind, "bfloat16")
    line["peak_fraction"] = round(line["flops"] / (line["ours_ms"] / 1000) / peak, 4) if peak else "unknown"
    if theirs is None:
        return line | {"not_compared": problem}
    line["theirs_ms"] = theirs.median_ms / calls
    if line["is_reference"]:
        return line | {"not_compared": "theirs is the reference: without a GPU their kernel does not run"}
    return line | {"speedup": line["theirs_ms"] / line["ours_ms"]}


def main(argv: list[str]) -> None:
    """Writes a line of races.jsonl in OUT after each core and shape, and table.md."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cores", default=" ".join(RACES), help="separated by spaces or commas")
    parser.add_argument("--shapes", default=SHAPES, help="sequences x length x heads x width, separated by spaces")
    parser.add_argument("--calls", type=positive, default=10, help="calls per turn")
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--seconds", type=positive, help="after which no race is begun")
    add_python(parser)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments = parser.parse_args(argv)
    names, shapes = split_words(arguments.cores), [Shape.parse(word) for word in arguments.shapes.split()]
    if unknown := [name for name in names if name not in RACES]:
        raise InputError(f"--cores={arguments.cores}: {unknown[0]} must be among {', '.join(RACES)}")
    about, start = machine(), time.perf_counter()
    is_over = lambda: bool(arguments.seconds) and time.perf_counter() - start > arguments.seconds
    results, left = CellLines(arguments.out / "races.jsonl", "core", "shape"), []
    with contextlib.ExitStack() as stack:
        peer = None
        if arguments.python.exists():
            peer = stack.enter_context(start_peer("races", arguments.python, WORKER))
        for shape in shapes:  # all cores at the first shape come first
            compile_ahead(names, shape, is_over)
            for name in names:
                if is_over():
                    left.append(f"{name} at {shape}")
                    continue
                line = race_line(name, shape, peer, arguments.rounds, arguments.calls)
                results.put(line | about)
                said = f"{line['speedup']:.2f} times as fast" if "speedup" in line else line["not_compared"]
                print(f"{name} at {shape}: {said}", flush=True)
    if left:
        print(f"not measured because of --seconds={arguments.seconds}: {', '.join(left)}")
    text = markdown_table([line | {"machine": machines([line])} for line in results.lines], COLUMNS)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run(main)
