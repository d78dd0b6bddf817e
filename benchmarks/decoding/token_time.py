"""What a token costs after a context of 256 … 65536 tokens, for every family: milliseconds and bytes of state.

    python -m benchmarks.decoding.token_time --out=benchmarks/decoding/results/papers [--config.model.num_layers=4 …]

The state of a long context is made by setting its counter: what is in it does not change the work. Families take turns;
one may stand there with keys of its own, as in flash+state_dtype=bfloat16. Beside them, a Transformer++ that computes
its whole prefix again for each token; and 8192 tokens prefilled against stepping through them. A token has to read the
weights and the state once: these bytes, divided by its time, are reported beside the device's rate of copying a large
array.
"""

import argparse
import logging
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.bare_decoding import BareDecoding
from benchmarks.lib.timing import ROUNDS, Cell, take_turns, timed
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import parse_integers, positive
from flash_lm.config.overrides import variant
from flash_lm.errors import InputError
from flash_lm.families.family import families_with_form
from flash_lm.report.figure import can_draw
from flash_lm.report.markdown import markdown_table, pivot
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.runs.jsonl import Line, append_jsonl, write_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.training.device import free_memory

CACHED = "transformer_plus_plus"
GROUPED = "transformer_plus_plus+num_kv_heads=2"  # of eight: as many to a head of keys as in today's models
RECOMPUTED = "transformer_plus_plus, recomputed"
RECOMPUTED_UP_TO = 4096
PREFILLED, STEPPED = 8192, 128
SHARE = 0.8  # of the free memory, for the states
COPIED = 1 << 28  # bytes of the array whose copy gives the device's rate


def measure(
    models: list[BareDecoding],
    contexts: list[int],
    batches: list[int],
    tokens: int,
    rounds: int,
    room: int | None,
    keep: Callable,
) -> list[Line]:
    """Flat lines, one a model, context and batch; a state that has no room is not made. `keep` gets each context's."""
    lines: list[Line] = []
    weights = {model.family: model.weight_bytes for model in models}
    copy = copier()
    for rows in batches:
        for context in contexts:
            before = len(lines)
            cells: list[tuple[Line, Cell, int]] = []
            for model in models:
                line = {"family": model.family, "context": context, "batch": rows}
                line["state_bytes"] = model.engine.state_bytes(rows, context)
                # There are two while the state is put apart, and beside them all the parameters.
                if room is not None and SHARE * room < 2 * line["state_bytes"]:
                    lines.append(line | {"does_not_fit": f"{line['state_bytes'] / 1e9:.1f} GB of state"})
                    continue
                here = model.tokens_a_turn(tokens)
                cells.append((line, Cell.compiled(model.family, model.stepper(rows, context, here)), here))
                if model.family == CACHED and context <= RECOMPUTED_UP_TO:
                    line = line | {"family": RECOMPUTED, "state_bytes": 0}
                    cells.append((line, Cell.compiled(RECOMPUTED, model.recomputer(rows, context)), 1))
            say = lambda text, here=f"batch {rows}, context {context}": print(f"{here}: {text}", flush=True)
            copied = Cell.compiled("copy", copy)
            take_turns([copied, *(cell for _, cell, _ in cells)], rounds, say)
            copy_rate = 2 * COPIED / copied.median_ms / 1e6
            for line, cell, here in cells:
                line["ms_a_token"] = cell.median_ms / here
                line |= {"iqr_ms": cell.iqr_ms / here, "turns": len(cell.times_ms), "copy_gb_per_s": copy_rate}
                if line["family"] != RECOMPUTED:
                    read = weights[line["family"]] + line["state_bytes"]
                    line |= {"bytes_a_token": read, "gb_per_s": read / line["ms_a_token"] / 1e6}
                lines.append(line)
            keep(lines[before:])
    return lines


def copier() -> Callable[[], float]:
    """Reads a large array and writes another one; each call gives milliseconds."""
    array, copy = jnp.ones(COPIED // 4, jnp.float32), jax.jit(lambda x: 2 * x)
    return timed(lambda: jax.block_until_ready(copy(array)))


def measure_prefill(models: list[BareDecoding], rounds: int) -> list[Line]:
    """8192 tokens of one row at once, and stepping through as many, measured over the last 128 of them.

    A step attends to the whole capacity of a state that grows, so it costs the same at any place.
    """
    prompt, lines = np.ones(PREFILLED, np.int32), []
    for model in models:
        prefill = timed(lambda engine=model.engine: jax.block_until_ready(engine.prefill([prompt], 0)))
        step, whole = Cell.compiled("step", model.stepper(1, PREFILLED, STEPPED)), Cell.compiled("prefill", prefill)
        take_turns([step, whole], rounds)
        together, stepping = whole.median_ms, step.median_ms * PREFILLED / STEPPED
        lines.append(
            {"family": model.family, "prefill_ms": together, "stepping_ms": stepping, "ratio": stepping / together}
        )
        print(f"prefill of {model.family}: {stepping / together:.0f} times as fast as stepping", flush=True)
    return lines


def tables(lines: list[Line], batches: list[int], prefills: list[Line]) -> str:
    """Markdown."""
    found = []
    for title, key, form, unit in (
        ("ms a token", "ms_a_token", "{:.2f}", 1),
        ("MB of state", "state_bytes", "{:,.2f}", 1e-6),
        ("GB/s of weights and state", "gb_per_s", "{:.1f}", 1),
    ):
        for rows in batches:
            here = [line for line in lines if line["batch"] == rows and key in line]
            found += [f"{title}, batch {rows}, by context", pivot(here, "family", "context", key, form, unit)]
    columns = {
        "family": ("family", "{}"),
        "prefilled, ms": ("prefill_ms", "{:,.0f}"),
        "stepped, ms": ("stepping_ms", "{:,.0f}"),
        "ratio": ("ratio", "{:.1f}"),
    }
    if prefills:
        found += [f"{PREFILLED} tokens of one row", markdown_table(prefills, columns)]
    return "\n\n".join(found)


def plot(lines: list[Line], batches: list[int], path: pathlib.Path) -> None:
    """For each batch size the time of a token and the bytes of state, against the context."""
    rows = []
    for batch in batches:
        x, title = ("context", "tokens of context"), f"batch {batch}"
        here = [line for line in lines if line["batch"] == batch and "ms_a_token" in line]
        time = Panel(here, *x, "ms_a_token", "milliseconds a token", title=title)
        state = Panel(here, *x, "state_bytes", "megabytes of state", unit=1e-6, title=title)
        rows.append([time, state])
    plot_panels(rows, path)


def main(argv: list[str]) -> None:
    """Writes decode.jsonl, prefill.jsonl, table.md and decode.png to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/small.py")
    parser.add_argument(
        "--families",
        default=" ".join([*families_with_form(causal=True), GROUPED]),
        help="between blanks, each with +key=value",
    )
    parser.add_argument("--contexts", default="256 1024 4096 16384 65536", help="between blanks or commas")
    parser.add_argument("--batches", default="1 16", help="between blanks or commas")
    parser.add_argument("--tokens", type=positive, default=16, help="generated a turn")
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--no_prefill", action="store_true", help="leave out the comparison of prefill and steps")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    families = arguments.families.split()
    contexts, batches = (parse_integers(words) for words in (arguments.contexts, arguments.batches))
    config = load_config(arguments.config, overrides)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # which keys a family ignores
    longest = max(*contexts, PREFILLED) + 2 * PREFILLED
    variants = ((word, *variant(config, word)) for word in families)
    models = [BareDecoding(changed, family, longest, word) for word, family, changed in variants]
    shortest = max(model.tokens_a_turn(arguments.tokens) for model in models)
    if min(contexts) < shortest:
        raise InputError(
            f"--contexts={arguments.contexts}: {shortest} tokens are generated a turn, give no shorter ones"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = provenance(jax.devices()[0].device_kind)
    sizes = {model.family: model.parameters for model in models}
    file = arguments.out / "decode.jsonl"
    file.unlink(missing_ok=True)

    def keep(lines: list[Line]) -> None:
        append_jsonl(file, [line | {"parameters": sizes[line["family"].split(", ")[0]], **about} for line in lines])

    prefills: list[Line] = []
    if not arguments.no_prefill:
        prefills = [line | about for line in measure_prefill(models, arguments.rounds)]
        write_jsonl(arguments.out / "prefill.jsonl", prefills)
    lines = measure(models, contexts, batches, arguments.tokens, arguments.rounds, free_memory(), keep)
    text = tables(lines, batches, prefills)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if can_draw():
        plot(lines, batches, arguments.out / "decode.png")


if __name__ == "__main__":
    run(main)
