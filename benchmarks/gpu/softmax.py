"""Checks softmax attention by the library of an accelerator, cuDNN or splash attention, then times it against blocks.

    python -m benchmarks.gpu.softmax --out=benchmarks/gpu/results/softmax
    python -m benchmarks.gpu.softmax --rehearse --out=runs/softmax    # on a CPU, at tiny sizes

Each mask that a layer asks a library for is checked: outputs and gradients against the plain form in float32 at its
highest precision, whose mask is made from the ids of the tokens alone. What differs ends the program with an error,
after all else. A rehearsal lets splash attention be interpreted, and XLA compute what cuDNN is asked for.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.agreement import AGREES, worst_head
from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.errors import InputError, RunError
from flash_lm.layers.context import Context, make_memory
from flash_lm.ops.chunk_rows import mask_of_chunks
from flash_lm.ops.fused_attention import LIBRARIES, fused_attention, problem
from flash_lm.ops.quadratic_attention import quadratic_attention
from flash_lm.ops.segments import find_segments
from flash_lm.ops.visibility import KeySpan, MaskStructure
from flash_lm.report.markdown import markdown_table
from flash_lm.runs.jsonl import Line
from flash_lm.timing.cell_lines import CellLines
from flash_lm.timing.machine import machine, machines
from flash_lm.timing.turns import Cell, make_turn, take_turns

OF_PLATFORM = {"gpu": ("cudnn",), "tpu": ("splash",)}
THREADS = 8  # cases that are compiled at the same time
CALLS = 10  # per turn
HIDDEN = -1e30
Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v and d_out; or the output and three gradients
COLUMNS = {
    "mask": ("case", "{}"),
    "by": ("implementation", "{}"),
    "sequences": ("sequences", "{:,}"),
    "length": ("length", "{:,}"),
    "distance": ("output_error", "{:.1e}"),
    "of gradients": ("gradient_error", "{:.1e}"),
    "ms": ("ms", "{:.2f}"),
    "in blocks, ms": ("blocked_ms", "{:.2f}"),
    "times as fast": ("speedup", "{:.2f}"),
    "on": ("machine", "{}"),
    "": ("not_measured", "{}"),
}


class Size(NamedTuple):
    """Sizes of the checks and of the times.

    Attributes:
        sequences: sequences of a check.
        length: their length, a multiple of `chunk`.
        heads: heads of queries, a multiple of `shared`.
        shared: heads of queries that share a head of keys in grouped-query attention.
        width: width of a head.
        chunk: tokens in a chunk.
        chunks: chunks of a check in which each is a sequence.
        tokens: tokens of the times.
        lengths: their sequence lengths.
        dtype: dtype of all arrays.
    """

    sequences: int
    length: int
    heads: int
    shared: int
    width: int
    chunk: int
    chunks: int
    tokens: int
    lengths: tuple[int, ...]
    dtype: str


FULL = Size(4, 1024, 12, 4, 64, 256, 256, 65536, (2048, 8192), "bfloat16")
REHEARSAL = Size(4, 160, 2, 2, 8, 32, 20, 320, (160,), "float32")


class Mask(NamedTuple):
    """A mask as a layer says it, and for the check which keys each query sees.

    Attributes:
        key_span: keys that each query sees.
        structure: the same in terms of the sequence, or None.
        seen: returns the same, B×L×M, from the ids of the tokens alone.
        real_BxL: queries whose output counts: that of padding is not used.
        keys: number of keys.
        shared: heads of queries that share a head of keys.
    """

    key_span: KeySpan
    structure: MaskStructure | None
    seen: Callable[[], np.ndarray]
    real_BxL: np.ndarray
    keys: int
    shared: int = 1


def padded(size: Size) -> np.ndarray:
    """Returns segment ids of one document per sequence, of several lengths: full to none."""
    lengths = np.linspace(size.length, 0, size.sequences).astype(np.int32)
    return (np.arange(size.length) < lengths[:, None]).astype(np.int32)


def packed(sequences: int, length: int) -> np.ndarray:
    """Returns segment ids of documents of random lengths, with padding between some of them and at the end."""
    begins = np.random.default_rng(1).random((sequences, length)) < 4 / length
    ids = begins.cumsum(axis=1) + 1
    return np.where((ids % 4 == 0) | (np.arange(length) >= 0.95 * length), 0, ids).astype(np.int32)


def make_mask(
    ids: np.ndarray, *, causal: bool, packed: bool = False, window: int | None = None, chunk: int | None = None
) -> Mask:
    """Returns the mask of self-attention over sequences with these segment ids, or inside their chunks."""
    context = Context(
        positions_BxL=jnp.zeros(ids.shape, jnp.int32),
        segments=find_segments(jnp.asarray(ids)),
        causal=causal,
        packed=packed,
    )
    key_span, structure = context.key_span(window), context.structure(window)
    if chunk is not None:
        key_span, structure = mask_of_chunks(key_span, structure, chunk, len(ids))
        ids = ids.reshape(-1, chunk)
    length = ids.shape[1]

    def seen() -> np.ndarray:
        distance = np.arange(length)[:, None] - np.arange(length)
        near = (abs(distance) < (window or length)) & ((distance >= 0) | (not causal))
        return (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, :, None] & near

    return Mask(key_span, structure, seen, ids > 0, length)


def prefill(size: Size) -> Mask:
    """Returns the mask of a piece of each prompt and its cache, which have no structure."""
    queries = np.arange(size.length // 2)
    index = queries + np.arange(size.sequences)[:, None] * size.length // (2 * size.sequences)
    real = queries < np.linspace(size.length // 2, 1, size.sequences).astype(np.int32)[:, None]
    context = Context(positions_BxL=jnp.asarray(index), lengths_B=jnp.asarray(real.sum(axis=1)), causal=True)
    seen = lambda: (np.arange(size.length) <= index[:, :, None]) & real[:, :, None]
    return Mask(context.key_span(), context.structure(), seen, real, size.length)


def cross(size: Size, is_packed: bool) -> Mask:
    """Returns the mask of cross attention to shorter sequences: all that is real, or those of the same document."""
    keys = size.length // 2
    ids = packed(size.sequences, size.length) if is_packed else padded(size)
    of_keys = ids[:, ::2] if is_packed else np.ascontiguousarray(padded(size)[::-1, :keys])
    memory = make_memory(
        jnp.zeros((*of_keys.shape, 1)), jnp.asarray(of_keys), jnp.asarray(ids), size.length, packed=is_packed
    )
    same = ids[:, :, None] == of_keys[:, None] if is_packed else (of_keys > 0)[:, None]
    return Mask(memory.key_span(), memory.structure(), lambda: same & (ids > 0)[:, :, None], ids > 0, keys)


def in_chunks(size: Size) -> np.ndarray:
    """Returns ids of documents whose chunks are `size.chunks` rows, some of which are padding alone."""
    return padded(size._replace(length=size.chunk * size.chunks // size.sequences))


# Masks by priority.
MASKS: Mapping[str, Callable[[Size], Mask]] = {
    "causal": lambda size: make_mask(padded(size), causal=True),
    "packed, causal": lambda size: make_mask(packed(size.sequences, size.length), causal=True, packed=True),
    "both ways, padded": lambda size: make_mask(padded(size), causal=False),
    "chunks, causal": lambda size: make_mask(in_chunks(size), causal=True, chunk=size.chunk),
    "causal window": lambda size: make_mask(padded(size), causal=True, window=size.length // 5),
    "grouped queries": lambda size: make_mask(padded(size), causal=True)._replace(shared=size.shared),
    "prefill": prefill,
    "cross attention": lambda size: cross(size, is_packed=False),
    "chunks, both ways": lambda size: make_mask(in_chunks(size), causal=False, chunk=size.chunk),
    "packed": lambda size: make_mask(packed(size.sequences, size.length), causal=False, packed=True),
    "packed cross attention": lambda size: cross(size, is_packed=True),
    "packed, chunks": lambda size: make_mask(
        packed(size.sequences, size.chunk * size.chunks // size.sequences), causal=True, packed=True, chunk=size.chunk
    ),
}
TIMED = {
    "causal": lambda rows, length: make_mask(np.ones((rows, length), np.int32), causal=True),
    "packed, causal": lambda rows, length: make_mask(packed(rows, length), causal=True, packed=True),
}


def make_arrays(mask: Mask, size: Size) -> Arrays:
    """Draws queries, keys, values, and a gradient of the output that is zero at padding."""
    rows, queries = mask.real_BxL.shape
    shapes = [(size.heads, queries), *[(size.heads // mask.shared, mask.keys)] * 2, (size.heads, queries)]
    random = jax.random.split(jax.random.key(0), len(shapes))
    q, k, v, d_out = (
        jax.random.normal(key, (rows, *shape, size.width), size.dtype)
        for key, shape in zip(random, shapes, strict=True)
    )
    return q, k, v, jnp.where(mask.real_BxL[:, None, :, None], d_out, 0)


def by_library(name: str, q: jax.Array, k: jax.Array, v: jax.Array, key_span: KeySpan, structure: Any) -> jax.Array:
    """Softmax attention by a library."""
    return fused_attention(name, q, k, v, key_span, structure, scale=q.shape[-1] ** -0.5)


def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, key_span: KeySpan, structure: Any) -> jax.Array:
    """The same in blocks, as XLA compiles it."""
    ones, scale = jnp.ones(key_span.first_BxL.shape, jnp.float32), q.shape[-1] ** -0.5
    return quadratic_attention(q, k, v, key_span, function="softmax", scale=scale, divisor_BxL=ones, blocked=True)


def plainly(q: jax.Array, k: jax.Array, v: jax.Array, seen_BxLxM: jax.Array) -> jax.Array:
    """The same with all pairs, in the highest precision."""
    product = functools.partial(jnp.einsum, precision="highest")
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = product("bhik,bhjk->bhij", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen_BxLxM[:, None], scores, HIDDEN), axis=-1)
    return product("bhij,bhje->bhie", jnp.where(seen_BxLxM[:, None], weights, 0), v)


def with_gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the compiled function ((q, k, v, gradient), *mask) -> output and the gradients of q, k and v."""

    def both(arrays: Arrays, *mask: Any) -> Arrays:
        out, pull = jax.vjp(lambda *x: attend(*x, *mask), *arrays[:3])
        return out, *pull(arrays[3])

    return jax.jit(both)


def compare(mask: Mask, found: Arrays, expected: Arrays, allowed: float) -> Line:
    """Returns the distances of output and gradients, and whether they are allowed."""
    counted = lambda out: jnp.where(mask.real_BxL[:, None, :, None], out, 0)
    output = float(worst_head(counted(found[0]), counted(expected[0]).astype(jnp.float32)))
    pairs = zip(found[1:], expected[1:], strict=True)
    gradient = float(np.max([worst_head(x, wanted.astype(jnp.float32)) for x, wanted in pairs]))
    agrees = bool(output <= allowed and gradient <= allowed)  # not if one is NaN
    return {"output_error": output, "gradient_error": gradient, "allowed": allowed, "agrees": agrees}


def check(name: str, mask: Mask, size: Size) -> Line:
    """Returns the distances of a library from the plain form, or why it refuses the mask: `auto` is then blocked."""
    arrays = make_arrays(mask, size)
    if reason := problem(name, *arrays[:3], mask.key_span, mask.structure):
        return {"not_measured": f"refused: {reason}"}
    found = with_gradients(functools.partial(by_library, name))(arrays, mask.key_span, mask.structure)
    exact = tuple(x.astype(jnp.float32) for x in arrays)
    return compare(mask, found, with_gradients(plainly)(exact, jnp.asarray(mask.seen())), AGREES[size.dtype])


def time_forms(name: str, mask: Mask, size: Size) -> Line:
    """Returns the times of a library and of blocks, forward and backward, in ms, and their distance."""
    arrays = make_arrays(mask, size)
    if reason := problem(name, *arrays[:3], mask.key_span, mask.structure):
        return {"not_measured": f"refused: {reason}"}
    forms = {"ms": with_gradients(functools.partial(by_library, name)), "blocked_ms": with_gradients(in_blocks)}
    calls = {key: functools.partial(form, arrays, mask.key_span, mask.structure) for key, form in forms.items()}
    results = [jax.block_until_ready(call()) for call in calls.values()]
    # Each of them may be as far from exact as a check allows.
    line = compare(mask, results[0], results[1], 2 * AGREES[size.dtype])
    cells = {
        key: Cell.warm_up(key, make_turn(lambda call=call: jax.block_until_ready([call() for _ in range(CALLS)])))
        for key, call in calls.items()
    }
    take_turns([*cells.values()], 1)
    line |= {key: cell.median_ms / CALLS for key, cell in cells.items()}
    return line | {"speedup": line["blocked_ms"] / line["ms"]}


@contextlib.contextmanager
def libraries_here(rehearse: bool) -> Iterator[tuple[str, ...]]:
    """The libraries of this machine; in a rehearsal both, interpreted or computed by XLA through the same interface.

    Raises:
        InputError: this machine has none, and it is no rehearsal.
    """
    if not rehearse:
        if jax.default_backend() not in OF_PLATFORM:
            raise InputError(f"a {jax.default_backend()} has no such library: set --rehearse to try the program")
        yield OF_PLATFORM[jax.default_backend()]
        return
    before, by_jax, splash = dict(LIBRARIES), jax.nn.dot_product_attention, cast(Any, LIBRARIES["splash"].attend)
    LIBRARIES["splash"] = before["splash"]._replace(platform=None, attend=functools.partial(splash, interpret=True))
    LIBRARIES["cudnn"] = before["cudnn"]._replace(platform=None, refuses=lambda q, structure: None)
    jax.nn.dot_product_attention = lambda *x, implementation, **more: by_jax(*x, implementation="xla", **more)
    try:
        yield "cudnn", "splash"
    finally:
        LIBRARIES.update(before)
        jax.nn.dot_product_attention = by_jax


class Results:
    """The lines of a run, each in the file when its cell ends, and the time limit."""

    def __init__(self, out: pathlib.Path, about: Line, size: Size, seconds: int | None):
        """`about`: facts of the machine; `seconds`: after which no cell is begun."""
        self.cells = CellLines(out / "softmax.jsonl", "case", "implementation", "length", "sequences")
        self.about, self.size, self.seconds, self.start = about, size, seconds, time.perf_counter()

    def measure(self, function: Callable[[str, Mask, Size], Line], name: str, mask: Mask) -> Line:
        """Measures a cell unless the time is over; a failure of one is its line, and the others continue."""
        if self.seconds and time.perf_counter() - self.start > self.seconds:
            return {"not_measured": f"--seconds={self.seconds} were over"}
        try:
            return function(name, mask, self.size)
        except Exception as error:  # any error of a library on this machine
            return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}

    def put(self, case: str, name: str, mask: Mask, line: Line) -> None:
        """Writes and prints the line of a cell."""
        rows, queries = mask.real_BxL.shape
        size = {"sequences": rows, "length": queries, "keys": mask.keys, "width": self.size.width}
        heads = {"heads": self.size.heads, "key_heads": self.size.heads // mask.shared, "dtype": self.size.dtype}
        self.cells.put({"case": case, "implementation": name, **size, **heads, **line, **self.about})
        words = {"failed": "failed: {}", "not_measured": "{}", "output_error": "distance {:.1e}"}
        said = [text.format(line[key]) for key, text in words.items() if key in line]
        said += [f"of gradients {line['gradient_error']:.1e}"] if "gradient_error" in line else []
        said += [f"{line['ms']:.2f} ms, in blocks {line['blocked_ms']:.2f} ms"] if "ms" in line else []
        print(f"{case}, {rows} sequences of {queries}, {name}: {', '.join(said)}", flush=True)

    def wrong(self) -> list[str]:
        """Returns a sentence per cell that failed, or whose distance is too large."""
        named = [(f"{x['implementation']}, {x['case']}, {x['length']} tokens", x) for x in self.cells.lines]
        failed = [f"{name}: {line['failed']}" for name, line in named if "failed" in line]
        far = "{}: {output_error:.2g} from exact, its gradients {gradient_error:.2g}, where {allowed:g} is allowed"
        return failed + [far.format(name, **line) for name, line in named if not line.get("agrees", True)]


def main(argv: list[str]) -> None:
    """Writes a line of softmax.jsonl in OUT after each mask, and table.md."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=positive, help="after which no mask is begun")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at tiny sizes")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments = parser.parse_args(argv)
    size = REHEARSAL if arguments.rehearse else FULL
    about = machine()
    with libraries_here(arguments.rehearse) as names:
        results = Results(arguments.out, about, size, arguments.seconds)
        # Most of a check is compilation.
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            masks = {(case, name): make(size) for case, make in MASKS.items() for name in names}
            waiting = {pool.submit(results.measure, check, key[1], mask): key for key, mask in masks.items()}
            for done in concurrent.futures.as_completed(waiting):
                key = waiting[done]
                results.put(*key, masks[key], done.result())
        for length in size.lengths:
            for case, make in TIMED.items():
                for name in names:
                    mask = make(size.tokens // length, length)
                    results.put(f"{case}, timed", name, mask, results.measure(time_forms, name, mask))
    lines = [line | {"machine": machines([line])} for line in results.cells.lines]
    text = markdown_table(lines, COLUMNS)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if wrong := results.wrong():
        instead = "set --config.model.quadratic.implementation=blocked"
        raise RunError(f"do not use these: {'; '.join(wrong)}; {instead}")


if __name__ == "__main__":
    run(main)
