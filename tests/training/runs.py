"""Helpers for the tests of resumed runs."""

import itertools
import pathlib

from small import small_config, write_corpus

from flash_lm.runs.jsonl import read_jsonl


def small_run(folder: pathlib.Path):
    """A config whose tokenizer is trained on the corpus; trained again, it might have another vocabulary."""
    config = small_config(write_corpus(folder / "text"), folder / "cache", "flash")
    config.data.update(tokenizer="sentencepiece", vocab_size=320)
    config.model.update(num_layers=2, num_heads=4)
    return config


def stop_after(steps: int):
    counter = itertools.count(1)
    return lambda: next(counter) == steps


def losses(workdir: pathlib.Path) -> dict[tuple[int, str], float]:
    return {(line["step"], line["split"]): line["loss"] for line in read_jsonl(workdir / "metrics.jsonl")}
