"""Measures images per second, drawn pixel by pixel with random weights: linear against softmax attention.

    python -m benchmarks.decoding.images --out=benchmarks/decoding/results/images [--config.model.num_layers=4 …]

Softmax attention has a cache of keys and values, or recomputes the full prefix for each pixel, as in tables 1 and 2 of
"Transformers are RNNs" (Katharopoulos et al. 2020). The time of an image is the time per pixel times its pixels. It is
measured at the last pixels, since an empty state or cache is not faster; with recomputation it is the mean of four
positions. All methods take turns.
"""

import argparse
import logging
import pathlib
import statistics
from typing import Any

import jax

from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import parse_integers, positive, split_words
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.errors import InputError
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line, append_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.timing.bare_decoding import BareDecoding
from flash_lm.timing.turns import ROUNDS, Cell, take_turns
from flash_lm.training.device import free_memory

PIXELS = {"MNIST": 28 * 28, "CIFAR-10": 32 * 32 * 3}
LINEAR, CACHED, RECOMPUTED = "linear, recurrent state", "softmax, cache", "softmax, recomputed"
POSITIONS = (1 / 8, 3 / 8, 5 / 8, 7 / 8)  # positions in the image, as shares of it
SHARE = 0.8  # share of the free memory to use for states
MOST_RECOMPUTED = 2**14  # tokens in a batch of prefixes; more rows do not make it faster
COLUMNS: Columns = {
    "images": ("images", "{}"),
    "attention": ("way", "{}"),
    "batch": ("batch", "{}"),
    "ms per pixel": ("ms_a_pixel", "{:.2f}"),
    "images/s": ("images_per_s", "{:.4g}"),
    "MB of state": ("state_mb", "{:,.1f}"),
}


def measure(config: Any, images: str, batches: list[int], tokens: int, rounds: int) -> list[Line]:
    """Returns flat lines, one per method and batch size."""
    pixels, lines = PIXELS[images], []
    linear, softmax = (BareDecoding(config, family, pixels) for family in ("linear_transformer", "transformer"))
    for batch in batches:
        cells: dict[str, list[Cell]] = {}
        # Methods with a state, if two states fit into memory.
        for method, model in ((LINEAR, linear), (CACHED, softmax)):
            state = model.engine.state_bytes(batch, pixels)
            if (room := free_memory()) is not None and SHARE * room < 2 * state:  # two exist for a moment
                print(f"{images}, batch {batch}, {method}: no room for {state / 1e9:.1f} GB of state", flush=True)
                continue
            cells[method] = [Cell.compile(method, model.make_decode_turn(batch, pixels, model.tokens_per_turn(tokens)))]
        # Recomputed prefixes, at four positions of the image.
        if batch * pixels <= MOST_RECOMPUTED:
            contexts = [round(position * pixels) for position in POSITIONS]
            cells[RECOMPUTED] = [
                Cell.compile(RECOMPUTED, softmax.make_recompute_turn(batch, context)) for context in contexts
            ]
        log = lambda text, batch=batch: print(f"{images}, batch {batch}: {text}", flush=True)
        # All methods of this batch size take turns.
        take_turns([cell for turns in cells.values() for cell in turns], rounds, log)
        for method, turns in cells.items():
            model = linear if method == LINEAR else softmax
            per_turn = 1 if method == RECOMPUTED else model.tokens_per_turn(tokens)
            ms_a_pixel = statistics.mean(cell.median_ms for cell in turns) / per_turn
            line = {"images": images, "pixels": pixels, "way": method, "batch": batch, "ms_a_pixel": ms_a_pixel}
            line["images_per_s"] = batch * 1000 / (ms_a_pixel * pixels)
            line["spread"] = max(cell.iqr_ms / cell.median_ms for cell in turns)
            line["state_mb"] = 0 if method == RECOMPUTED else model.engine.state_bytes(batch, pixels) / 1e6
            lines.append(line | {"turns": len(turns[0].times_ms), "parameters": model.parameters})
    return lines


def tables(lines: list[Line]) -> str:
    """Returns Markdown tables: every cell, and each method with its best batch size."""
    best = []
    for images in dict.fromkeys(line["images"] for line in lines):
        rate = {}
        for line in (line for line in lines if line["images"] == images):
            rate[line["way"]] = max(rate.get(line["way"], 0.0), line["images_per_s"])
        ratios = [(f"times {method}", rate[LINEAR] / rate[method]) for method in (RECOMPUTED, CACHED) if method in rate]
        best.append({"images": images} | rate | dict(ratios))
    columns: Columns = {"images": ("images", "{}")} | {
        method: (method, "{:.4g}") for method in (RECOMPUTED, CACHED, LINEAR)
    }
    columns = columns | {f"linear / {method}": (f"times {method}", "{:,.1f}") for method in (RECOMPUTED, CACHED)}
    return f"{markdown_table(lines, COLUMNS)}\n\nImages per second, at the best of these batches\n\n" + markdown_table(
        best, columns
    )


def main(argv: list[str]) -> None:
    """Writes images.jsonl and table.md to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/mnist.py")
    parser.add_argument("--images", default=" ".join(PIXELS), help="separated by spaces or commas")
    parser.add_argument("--batches", default="1 16 64 256", help="separated by spaces or commas")
    parser.add_argument("--tokens", type=positive, default=16, help="drawn per turn, for softmax attention")
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments, overrides = parser.parse_known_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides the keys that a family ignores
    config: Any = load_config(arguments.config, overrides)
    config.model.vocab_size = ByteTokenizer.vocab_size
    batches, asked = parse_integers(arguments.batches), split_words(arguments.images)
    if (unknown := sorted(set(asked) - PIXELS.keys())) or not asked:
        raise InputError(f"--images: {', '.join(unknown) or 'nothing'} must be among {' '.join(PIXELS)}")
    if arguments.tokens > (most := min(PIXELS[images] for images in asked)):
        raise InputError(f"--tokens={arguments.tokens} is over the {most} pixels of an image: draw fewer per turn")
    about, lines = provenance(jax.devices()[0].device_kind), []
    file = arguments.out / "images.jsonl"
    file.unlink(missing_ok=True)
    # Measure, and append the lines of each kind of image.
    for images in asked:
        image_lines = measure(config, images, batches, arguments.tokens, arguments.rounds)
        append_jsonl(file, [line | about for line in image_lines])
        lines += image_lines
    text = tables(lines)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run(main)
