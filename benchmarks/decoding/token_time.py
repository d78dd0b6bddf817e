"""Measures decoding after a context of 256 … 65536 tokens for every family: ms per token and bytes of state.

    python -m benchmarks.decoding.token_time --out=benchmarks/decoding/results/papers [--config.model.num_layers=4 …]

The state of a long context is made by setting its counter, since its values do not change the work. Families take
turns. A family may have other keys, as in flash+state_dtype=bfloat16. A Transformer++ that recomputes its full prefix
for each token is measured, too. The prefill of 8192 tokens is compared with stepping through them. Each token reads the
weights and the state once. These bytes, divided by its time, are reported with the device's rate of copying a large
array.
"""

import argparse
import itertools
import logging
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import parse_integers, positive
from flash_lm.config.overrides import variant
from flash_lm.errors import InputError
from flash_lm.families.family import families_with_form
from flash_lm.report.figure import can_draw
from flash_lm.report.markdown import markdown_table, pivot
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.runs.jsonl import Line, write_jsonl
from flash_lm.timing.bare_decoding import BareDecoding
from flash_lm.timing.cell_lines import CellLines
from flash_lm.timing.machine import machine, machines
from flash_lm.timing.turns import ROUNDS, Cell, make_turn, take_turns
from flash_lm.training.chips import peak_flops
from flash_lm.training.device import free_memory

CACHED = "transformer_plus_plus"
GROUPED = "transformer_plus_plus+num_kv_heads=2"  # four query heads per key head, as in today's models
RECOMPUTED = "transformer_plus_plus, recomputed"
RECOMPUTED_UP_TO = 4096
PREFILLED, STEPPED = 8192, 128
SHARE = 0.8  # share of the free memory for states
COPIED = 1 << 28  # bytes of the array whose copy gives the device's rate


def measure(
    models: list[BareDecoding],
    contexts: list[int],
    batches: list[int],
    tokens: int,
    rounds: int,
    room: int | None,
    keep: Callable[[list[Line]], None],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Times one model, context and batch after another, in turns per context and batch.

    Args:
        models: the models.
        contexts: tokens before those that are generated.
        batches: sequences at a time.
        tokens: to generate in a turn; a family whose state does not grow generates a full chunk.
        rounds: see `take_turns`.
        room: free bytes; a state that does not fit is skipped, and its line says so. None: unknown.
        keep: called with the lines of a batch and context so far, after each turn.
        is_over: whether the time limit is over; cells that have not begun by then are skipped, and their lines say so.
    """
    copy = make_copy_turn()
    for rows, context in itertools.product(batches, contexts):
        cells: list[tuple[Line, Cell | None, int, BareDecoding | None]] = []
        for model in models:
            line = {"family": model.family, "context": context, "batch": rows}
            line["state_bytes"] = model.engine.state_bytes(rows, context)
            # Two states exist while the state is unstacked, in addition to the parameters.
            if room is not None and SHARE * room < 2 * line["state_bytes"]:
                cells.append((line | {"does_not_fit": f"{line['state_bytes'] / 1e9:.1f} GB of state"}, None, 1, None))
                continue
            turn_tokens = model.tokens_per_turn(tokens)
            cell, why = _compile(model.family, model.make_decode_turn(rows, context, turn_tokens), is_over)
            cells.append((line | why, cell, turn_tokens, model))
            if model.family == CACHED and context <= RECOMPUTED_UP_TO:
                line = line | {"family": RECOMPUTED, "state_bytes": 0}
                cell, why = _compile(RECOMPUTED, model.make_recompute_turn(rows, context), is_over)
                cells.append((line | why, cell, 1, None))
        copy_cell = Cell.compile("copy", copy)

        def keep_times(cells=cells, copy_cell=copy_cell) -> None:
            keep([_line(line, cell, turn_tokens, model, copy_cell) for line, cell, turn_tokens, model in cells])

        keep_times()
        log = lambda text, of=f"batch {rows}, context {context}": print(f"{of}: {text}", flush=True)
        take_turns([copy_cell, *(cell for _, cell, _, _ in cells if cell)], rounds, log, keep_times)


def _compile(name: str, turn: Callable[[], float], is_over: Callable[[], bool]) -> tuple[Cell | None, Line]:
    """Returns a warm cell; or None, and why there is none: no time is left, or no memory."""
    if is_over():
        return None, {"skipped": "the time was over"}
    try:
        return Cell.compile(name, turn), {}
    except jax.errors.JaxRuntimeError as error:
        key = "does_not_fit" if "RESOURCE_EXHAUSTED" in str(error) else "failed"
        return None, {key: str(error).splitlines()[0][:200]}


def _line(line: Line, cell: Cell | None, turn_tokens: int, model: BareDecoding | None, copy: Cell) -> Line:
    """Returns a line with its times so far.

    For a model that decodes also with two rates: of reading weights and state, and of the FLOPs of the products with
    the weights, as a share of the device's peak.
    """
    if cell is None or not cell.times_ms:
        return line
    known = line | {"ms_a_token": cell.median_ms / turn_tokens, "iqr_ms": cell.iqr_ms / turn_tokens}
    known |= {"turns": len(cell.times_ms), "copy_gb_per_s": 2 * COPIED / copy.median_ms / 1e6}
    if model is not None:
        read = model.weight_bytes + line["state_bytes"]
        known |= {"bytes_a_token": read, "gb_per_s": read / known["ms_a_token"] / 1e6}
        peak = peak_flops(jax.devices()[0].device_kind, model.function.config.dtype)
        rate = 2 * model.weights * line["batch"] / (known["ms_a_token"] / 1000)
        known |= {"weight_flops_per_s": rate, "peak_fraction": rate / peak if peak else "unknown"}
    return known


def make_copy_turn() -> Callable[[], float]:
    """Returns a turn that copies a large array, in milliseconds."""
    array, copy = jnp.ones(COPIED // 4, jnp.float32), jax.jit(lambda x: 2 * x)
    return make_turn(lambda: jax.block_until_ready(copy(array)))


def measure_prefill(models: list[BareDecoding], rounds: int) -> list[Line]:
    """Times the prefill of 8192 tokens of one sequence, and stepping through as many, by the last 128 of them.

    A step attends to the full capacity of a growing state, so it costs the same at any position.
    """
    prompt, lines = np.ones(PREFILLED, np.int32), []
    for model in models:
        prefill = make_turn(lambda engine=model.engine: jax.block_until_ready(engine.prefill([prompt], 0)))
        step, prefill_cell = (
            Cell.compile("step", model.make_decode_turn(1, PREFILLED, STEPPED)),
            Cell.compile("prefill", prefill),
        )
        take_turns([step, prefill_cell], rounds)
        prefill_ms, stepping_ms = prefill_cell.median_ms, step.median_ms * PREFILLED / STEPPED
        lines.append(
            {
                "family": model.family,
                "prefill_ms": prefill_ms,
                "stepping_ms": stepping_ms,
                "ratio": stepping_ms / prefill_ms,
            }
        )
        print(f"prefill of {model.family}: {stepping_ms / prefill_ms:.0f} times as fast as stepping", flush=True)
    return lines


def tables(lines: list[Line], batches: list[int], prefills: list[Line]) -> str:
    """Returns Markdown tables of times, states and prefill."""
    parts = []
    for title, key, form, unit in (
        ("ms per token", "ms_a_token", "{:.2f}", 1),
        ("MB of state", "state_bytes", "{:,.2f}", 1e-6),
        ("GB/s of weights and state", "gb_per_s", "{:.1f}", 1),
    ):
        for rows in batches:
            batch_lines = [line for line in lines if line["batch"] == rows and key in line]
            heading = f"{title}, batch {rows}, by context; {machines(batch_lines)}"
            parts += [heading, pivot(batch_lines, "family", "context", key, form, unit)] if batch_lines else []
    columns = {
        "family": ("family", "{}"),
        "prefilled, ms": ("prefill_ms", "{:,.0f}"),
        "stepped, ms": ("stepping_ms", "{:,.0f}"),
        "ratio": ("ratio", "{:.1f}"),
    }
    if prefills:
        parts += [f"{PREFILLED} tokens of one sequence; {machines(prefills)}", markdown_table(prefills, columns)]
    return "\n\n".join(parts)


def plot(lines: list[Line], batches: list[int], path: pathlib.Path) -> None:
    """Plots time per token and bytes of state against the context, a row per batch size."""
    rows = []
    for batch in batches:
        x, title = ("context", "tokens of context"), f"batch {batch}"
        batch_lines = [line for line in lines if line["batch"] == batch and "ms_a_token" in line]
        times = Panel(batch_lines, *x, "ms_a_token", "milliseconds per token", title=title)
        state = Panel(batch_lines, *x, "state_bytes", "megabytes of state", unit=1e-6, title=title)
        rows.append([times, state])
    plot_panels(rows, path)


def main(argv: list[str]) -> None:
    """Writes prefill.jsonl and, after each turn, decode.jsonl to OUT; at the end table.md and decode.png."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/small.py")
    parser.add_argument(
        "--families",
        default=" ".join([*families_with_form(causal=True), GROUPED]),
        help="separated by spaces, each may have +key=value",
    )
    parser.add_argument("--contexts", default="256 1024 4096 16384 65536", help="separated by spaces or commas")
    parser.add_argument("--batches", default="1 16", help="separated by spaces or commas")
    parser.add_argument("--tokens", type=positive, default=16, help="generated per turn")
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--seconds", type=positive, help="after which no cell is compiled")
    parser.add_argument("--no_prefill", action="store_true", help="leave out the comparison of prefill and steps")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    # Build the models with positions for the longest context.
    families = arguments.families.split()
    contexts, batches = (parse_integers(words) for words in (arguments.contexts, arguments.batches))
    config = load_config(arguments.config, overrides)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # which keys a family ignores
    longest = max(*contexts, PREFILLED) + 2 * PREFILLED
    variants = ((word, *variant(config, word)) for word in families)
    models = [BareDecoding(changed, family, longest, word) for word, family, changed in variants]
    shortest = max(model.tokens_per_turn(arguments.tokens) for model in models)
    if min(contexts) < shortest:
        raise InputError(
            f"--contexts={arguments.contexts}: {shortest} tokens are generated per turn, give no shorter contexts"
        )
    about, start = machine(), time.perf_counter()
    sizes = {model.family: model.parameters for model in models}
    results = CellLines(arguments.out / "decode.jsonl", "family", "context", "batch")

    def keep(lines: list[Line]) -> None:
        results.put(*(line | {"parameters": sizes[line["family"].split(", ")[0]], **about} for line in lines))

    # Measure prefill, then decoding, whose lines are written as they come.
    prefills: list[Line] = []
    if not arguments.no_prefill:
        prefills = [line | about for line in measure_prefill(models, arguments.rounds)]
        write_jsonl(arguments.out / "prefill.jsonl", prefills)
    is_over = lambda: bool(arguments.seconds) and time.perf_counter() - start > arguments.seconds
    measure(models, contexts, batches, arguments.tokens, arguments.rounds, free_memory(), keep, is_over)
    lines = results.lines
    if skipped := [f"{x['family']}, batch {x['batch']}, context {x['context']}" for x in lines if "skipped" in x]:
        print(f"not measured because of --seconds={arguments.seconds}: {'; '.join(skipped)}")
    # Write the table and the picture.
    text = tables(lines, batches, prefills)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if can_draw():
        plot(lines, batches, arguments.out / "decode.png")


if __name__ == "__main__":
    run(main)
