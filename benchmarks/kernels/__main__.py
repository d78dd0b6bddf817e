"""Compares Pallas kernels with the versions that XLA compiles: first whether they agree, then their speed.

    python -m benchmarks.kernels --out=benchmarks/gpu/results/kernels [--lengths="2048 8192" --config.KEY=VALUE …]

Both are compared with the form that XLA compiles in float32 at its highest precision: the outputs, and the gradients of
values, queries, keys and bias, on full sequences and on packed ones of a length that no tile divides, causal and not. A
kernel that differs by more than its precision allows, or fails, is reported, and its family is not timed. Times are of
one attention core, forward, and forward and backward, several calls per turn. A matrix product takes turns with them,
and a kernel's rate is given as a fraction of its rate.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.lib.agreement import AGREES, distance
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import parse_integers, positive, split_words
from flash_lm.config.experiment import parse_model
from flash_lm.config.model import DTYPES
from flash_lm.errors import InputError, RunError
from flash_lm.families.family import FAMILIES, complete
from flash_lm.layers.attention_core import Pair
from flash_lm.layers.context import Context
from flash_lm.layers.decayed_core import DecayedCore, DecayedInputs
from flash_lm.ops.implementations import recorded
from flash_lm.ops.segments import find_segments, whole_row
from flash_lm.report.markdown import markdown_table
from flash_lm.runs.jsonl import Line, append_jsonl
from flash_lm.timing.machine import machine
from flash_lm.timing.turns import ROUNDS, Cell, make_turn, take_turns

BOTH_WAYS = ("flash_quad", "flash")  # the other families only have a causal kernel
FORMS = ("pallas", "xla")
PRODUCT = 8192  # rows and columns of the matrices
THREADS = 4  # cases that are compiled and checked at the same time, limited by the memory of a device
FLAG_KEYS = ("family", "kernels", "max_length", "causal", "dtype")  # keys that the flags set


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """An attention core of a family on sequences of one length."""

    config: Any
    family: str
    length: int
    tokens: int
    dtype: str
    causal: bool = True
    packed: bool = False

    @property
    def name(self) -> str:
        """Name in the progress line."""
        more = (", packed" if self.packed else "") + ("" if self.causal else ", bidirectional")
        return f"{self.family} at {self.length} tokens{more}"

    def sublayer(self, form: str) -> Any:
        """Returns the sublayer with `model.kernels=form`."""
        raw: Any = copy.deepcopy(self.config).model
        raw.update(family=self.family, max_length=self.length, causal=self.causal, kernels=form, dtype=self.dtype)
        return FAMILIES[self.family].sublayers[0](complete(parse_model(raw)), rngs=nnx.Rngs(0))

    def inputs(self, dtype: str) -> tuple[Any, jax.Array, jax.Array]:
        """Returns the core's queries and keys, values, and a gradient of the output; all normal, decays of 0 to 0.1."""
        sublayer, rows = self.sublayer("xla"), self.tokens // self.length
        core, keys = sublayer.core, iter(jax.random.split(jax.random.key(0), 8))
        assert _is_core_of_kernels(core), self.family

        def normal(width: int, heads: int = sublayer.heads) -> jax.Array:
            return jax.random.normal(next(keys), (rows, heads, self.length, width)).astype(dtype)

        if isinstance(core, DecayedCore):
            shared = 1 if core.shared_keys else sublayer.heads
            log_decay = -jax.random.uniform(next(keys), (rows, sublayer.heads, self.length), maxval=0.1)
            by = DecayedInputs(normal(sublayer.key_width, shared), normal(sublayer.key_width, shared), log_decay)
        else:
            by = {name: Pair(normal(sublayer.key_width), normal(sublayer.key_width)) for name in core.pair_scaling}
        return by, normal(sublayer.value_width), normal(sublayer.value_width)

    def segment_ids(self) -> jax.Array:
        """Returns documents of random lengths, with padding between some of them and at the end."""
        shape = (self.tokens // self.length, self.length)
        begins = jax.random.uniform(jax.random.key(1), shape) < 4 / self.length
        number = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
        at_end = jnp.arange(self.length)[None] >= 0.95 * self.length
        return jnp.where((number % 4 == 3) | at_end, 0, number + 1)

    def functions(self, form: str) -> tuple[Callable, Callable]:
        """Returns the forward pass, and the output with gradients; both are compiled at their first call."""
        graph, params, rest = nnx.split(self.sublayer(form).core, nnx.Param, ...)
        segments = find_segments(self.segment_ids()) if self.packed else whole_row(self.length)
        context = Context(positions_BxL=segments.offsets_BxL, segments=segments, causal=self.causal, packed=self.packed)

        def forward(params: nnx.State, by: Any, v: jax.Array) -> jax.Array:
            return nnx.merge(graph, params, rest)(by, v, context)

        def both(by: Any, v: jax.Array, d_out: jax.Array):
            out, pull = jax.vjp(forward, params, by, v)
            return out, pull(d_out.astype(out.dtype))

        return jax.jit(lambda by, v, d_out: forward(params, by, v)), jax.jit(both)

    def flops(self) -> float:
        """Returns the FLOPs of the forward pass, visible pairs only."""
        sublayer = self.sublayer("xla")
        widths = sublayer.heads, sublayer.key_width, sublayer.value_width
        return sublayer.core.flops_per_token(self.length, self.causal, *widths) * self.tokens


def with_kernels(config: Any, families: Iterable[str] = FAMILIES) -> list[str]:
    """Returns those families whose core takes a kernel of ours with this config, as tracing reports it.

    Others read `model.kernels` for kernels of other packages, or have softmax, which libraries compute.
    """

    def has_kernel(family: str) -> bool:
        case = Case(config, family, length=128, tokens=128, dtype="float32")
        if not _is_core_of_kernels(nnx.eval_shape(lambda: case.sublayer("xla")).core):
            return False
        with recorded() as parts:
            jax.eval_shape(case.functions("pallas")[0], *jax.eval_shape(lambda: case.inputs("float32")))
        return "Pallas kernel" in str(parts)

    return [name for name in families if "model.kernels" in FAMILIES[name].reads() and has_kernel(name)]


def _is_core_of_kernels(core: Any) -> bool:
    """Whether `Case.inputs` makes what a core needs: pairs of queries and keys, or sums with scalar decay."""
    return isinstance(core, DecayedCore) or hasattr(core, "pair_scaling")


def check(case: Case) -> Line:
    """Returns the distance of both versions from the one in highest precision.

    Raises:
        RunError: the kernel differs too much.
    """
    inputs = case.inputs(case.dtype)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        expected = dataclasses.replace(case, dtype="float32").functions("xla")[1](*exact)
    line: Line = {"family": case.family, "length": case.length}
    for form in FORMS:
        outputs = case.functions(form)[1](*inputs)
        distances = jax.tree.leaves(jax.tree.map(distance, outputs, expected))
        line[f"{form}_error"] = float(np.max(distances))  # NaN if one of them is
    allowed = AGREES[case.dtype]
    if not line["pallas_error"] <= allowed:  # also true for NaN
        raise RunError(
            f"{line['pallas_error']:.2g} from the form in highest precision, where {allowed:g} is allowed and XLA's "
            f"form is {line['xla_error']:.2g} away"
        )
    return line


def check_all(cases: list[Case]) -> tuple[dict[Case, Line], dict[Case, str]]:
    """Returns the distances of the cases that agree, and the errors of the others; most of the time is compilation."""
    lines, failed_checks = {}, {}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        case_of = {pool.submit(check, case): case for case in cases}
        for checked in concurrent.futures.as_completed(case_of):
            case = case_of[checked]
            try:
                lines[case] = checked.result()
                text = ", ".join(f"{form} {lines[case][f'{form}_error']:.1e}" for form in FORMS)
            except (RunError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
                text = failed_checks[case] = str(error).splitlines()[0][:300]
            print(f"{case.name}: distance from highest precision: {text}", flush=True)
    return lines, failed_checks


def product_of_squares(dtype: str, calls: int) -> Cell:
    """Returns a warm cell of `calls` products of two square matrices, the reference rate."""
    square = jax.random.normal(jax.random.key(0), (PRODUCT, PRODUCT), dtype)
    multiply = jax.jit(lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.float32))
    work = make_turn(lambda: jax.block_until_ready([multiply(square) for _ in range(calls)]))
    work()
    return Cell.warm_up("matrix product", work)


def time_forms(case: Case, product: Cell, rounds: int, calls: int) -> Line:
    """Times both versions in ms per call, and the kernel's rate as a share of a matrix product's.

    A turn has several calls, so that the device does not wait for the next call.
    """
    inputs = case.inputs(case.dtype)
    cells: dict[str, Cell] = {}
    for form in FORMS:
        for part, function in zip(("forward", "both"), case.functions(form), strict=True):
            jax.block_until_ready(function(*inputs))
            work = make_turn(lambda function=function: jax.block_until_ready([function(*inputs) for _ in range(calls)]))
            cells[f"{form}_{part}"] = Cell.warm_up(f"{case.name}, {form}, {part}", work)
    product.times_ms.clear()
    take_turns([*cells.values(), product], rounds)
    line: Line = {f"{name}_ms": cell.median_ms / calls for name, cell in cells.items()}
    line |= {"flops": case.flops(), "product_flops_per_s": calls * 2 * PRODUCT**3 / (product.median_ms / 1000)}
    for part, times in (("forward", 1), ("both", 3)):
        rate = times * line["flops"] / (line[f"pallas_{part}_ms"] / 1000)
        line[f"{part}_fraction"] = rate / line["product_flops_per_s"]
        line[f"{part}_speedup"] = line[f"xla_{part}_ms"] / line[f"pallas_{part}_ms"]
    return line


def _table(lines: list[Line]) -> str:
    columns = {
        "attention of": ("family", "{}"),
        "length": ("length", "{:,}"),
        "distance": ("pallas_error", "{:.1e}"),
        "of XLA's": ("xla_error", "{:.1e}"),
        "forward, ms": ("pallas_forward_ms", "{:.2f}"),
        "times XLA's speed": ("forward_speedup", "{:.2f}"),
        "with backward, ms": ("pallas_both_ms", "{:.2f}"),
        "times XLA's speed, both": ("both_speedup", "{:.2f}"),
        "forward, share of the product's rate": ("forward_fraction", "{:.0%}"),
        "both": ("both_fraction", "{:.0%}"),
        "device": ("device", "{}"),
    }
    return markdown_table(lines, columns)


def measure(
    config: Any, families: list[str], lengths: list[int], arguments: argparse.Namespace, about: Line, file: pathlib.Path
) -> tuple[list[Line], dict[Case, str], list[str]]:
    """Checks and times one family after another, so that each has its lines in `file` when it ends.

    Returns:
        The lines, the errors of cases whose check failed, and the names of those for which no time was left.
    """
    start, product = time.perf_counter(), None
    timed, failed_checks, left = [], {}, []
    is_over = lambda: bool(arguments.seconds) and time.perf_counter() - start > arguments.seconds
    odd = lengths[0] - lengths[0] // 7
    for name in families:
        # Timed cases, and packed ones of an odd length that are only checked.
        cases = [Case(config, name, length, arguments.tokens, arguments.dtype) for length in lengths]
        packed = [
            Case(config, name, odd, 4 * odd, arguments.dtype, causal, packed=True)
            for causal in ((True, False) if name in BOTH_WAYS else (True,))
        ]
        if is_over():
            left += [case.name for case in cases]
            continue
        line_of, failed = check_all([*packed, *cases])
        failed_checks |= failed
        for case in cases if not failed else []:
            if is_over():
                left.append(case.name)
                continue
            product = product or product_of_squares(arguments.dtype, arguments.calls)
            timed.append(line_of[case] | time_forms(case, product, arguments.rounds, arguments.calls) | about)
            append_jsonl(file, timed[-1:])
    return timed, failed_checks, left


def main(argv: list[str]) -> None:
    """Adds a line to kernels.jsonl in OUT as each length of a family ends, and writes table.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=main.__doc__)
    parser.add_argument("--config", default="configs/flash_base.py")
    parser.add_argument("--families", default="", help="separated by spaces or commas; default: all that have a kernel")
    parser.add_argument("--lengths", default="2048 8192", help="sequence lengths, separated by spaces or commas")
    parser.add_argument("--tokens", type=positive, default=2**16, help="tokens of all sequences")
    parser.add_argument("--calls", type=positive, default=10, help="calls per turn")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--seconds", type=positive, help="after which no family is checked, and no length timed")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments, overrides = parser.parse_known_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides the keys that a family ignores
    if misplaced := [
        word for word in overrides if word.startswith(tuple(f"--config.model.{key}=" for key in FLAG_KEYS))
    ]:
        raise InputError(f"{', '.join(misplaced)}: use this program's flags instead, see --help")
    config: Any = load_config(arguments.config, overrides)
    config.model.vocab_size = config.model.vocab_size or config.data.vocab_size
    families = split_words(arguments.families) or with_kernels(config)
    known = with_kernels(config, [name for name in families if name in FAMILIES])
    if unknown := [name for name in families if name not in known]:
        able = ", ".join(with_kernels(config)) or "none"
        raise InputError(f"--families={arguments.families}: {unknown[0]} has no kernel here; families that do: {able}")
    lengths = parse_integers(arguments.lengths)
    if uneven := [length for length in lengths if arguments.tokens % length]:
        raise InputError(
            f"--tokens={arguments.tokens} must be a multiple of each length, but is not one of {uneven[0]}"
        )
    about = {"tokens": arguments.tokens, "dtype": arguments.dtype} | machine()
    file, table = arguments.out / "kernels.jsonl", arguments.out / "table.md"
    for old in (file, table):
        old.unlink(missing_ok=True)  # otherwise the speeds of a kernel that no longer agrees would remain
    timed, failed_checks, left = measure(config, families, lengths, arguments, about, file)
    if left:
        print(f"not measured because of --seconds={arguments.seconds}: {', '.join(left)}")
    if timed:
        text = _table(timed)
        table.write_text(f"{text}\n", encoding="utf-8")
        print(text)
    if failed_checks:
        failures = "; ".join(f"{case.name}: {text}" for case, text in failed_checks.items())
        raise RunError(f"kernels that fail are not timed: {failures}; set --config.model.kernels=xla in runs of them")


if __name__ == "__main__":
    run(main)
