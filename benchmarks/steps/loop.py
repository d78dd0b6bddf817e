"""Measures the overhead of the training loop over the bare compiled step, and the speed of tokenising a corpus.

    python -m benchmarks.steps.loop --config=configs/quickstart.py --out=benchmarks/steps/results/loop.jsonl

The loop (data, logging, clock) and the bare step (same batch again and again, no reads between) take turns.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import tempfile
import time

import jax
from ml_collections import ConfigDict

from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.config.experiment import parse
from flash_lm.data.token_cache import load_tokenized
from flash_lm.runs.jsonl import append_jsonl, read_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.training.compiled_step import CompiledStep
from flash_lm.training.resume import new_state
from flash_lm.training.setup import build_experiment
from flash_lm.training.sharding import batch_sharding, shard_batch
from flash_lm.training.train_loop import train


def loop_step_ms(config: ConfigDict) -> float:
    """Returns the median ms per step over a run's logged intervals; the first interval is the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        train(config, pathlib.Path(folder))
        lines = [line for line in read_jsonl(pathlib.Path(folder) / "metrics.jsonl") if line["split"] == "train"]
    return statistics.median(line["step_ms"] for line in lines[1:])


def bare_step_ms(config: ConfigDict) -> float:
    """Returns the median ms per step over intervals as long as the loop's log intervals."""
    experiment = build_experiment(parse(config))
    with jax.set_mesh(experiment.mesh):
        step, state = CompiledStep(experiment), new_state(experiment)
        share = experiment.share()
        batch = shard_batch(next(experiment.training_batches(share)), batch_sharding(experiment.mesh), share)
        every, times = experiment.config.train.log_every, []
        for _ in range(experiment.config.train.steps // every):
            start = time.perf_counter()
            for _ in range(every):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            times.append(1000 * (time.perf_counter() - start) / every)
    return statistics.median(times[1:])


def tokenise_mb_per_s(config: ConfigDict) -> float:
    """Returns megabytes of text per second into an empty cache, without training the tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = build_experiment(parse(config))
        model = pathlib.Path(folder) / "tokenizer.model"
        model.write_bytes(experiment.corpus.tokenizer.model_bytes())
        data = dataclasses.replace(parse(config).data, cache_dir=folder, tokenizer_path=str(model))
        start = time.perf_counter()
        tokenized = load_tokenized(data)
        seconds = time.perf_counter() - start
        sizes = tokenized.tokenizer.bytes_per_token()
        return sum(int(sizes[store.tokens].sum()) for store in tokenized.splits.values()) / seconds / 1e6


def main(argv: list[str]) -> None:
    """Appends one JSON line to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--steps", type=int, default=60, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    config = load_config(arguments.config, overrides)
    # The loop and the bare step alternate; what surrounds the steps happens once.
    once = {"train.steps": arguments.steps, "train.eval_every": 0, "train.checkpoint_every": 0, "train.eval_steps": 1}
    config.update_from_flattened_dict(once)
    turns = [(loop_step_ms(config), bare_step_ms(config)) for _ in range(arguments.rounds)]
    loop, bare = (statistics.median(times) for times in zip(*turns, strict=True))
    # One line: both times and their ratio per round.
    line = {
        "family": parse(config).model.label,
        "loop_step_ms": loop,
        "bare_step_ms": bare,
        "turns_ms": turns,
        "ratio": statistics.median(a / b for a, b in turns),
        "tokenise_mb_per_s": tokenise_mb_per_s(config),
        **provenance(jax.devices()[0].device_kind),
    }
    append_jsonl(arguments.out, [line])
    print(json.dumps(line, indent=2))


if __name__ == "__main__":
    run(main)
