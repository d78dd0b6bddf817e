"""Measures the peak memory of one training step, forward, backward and update, on random tokens.

    python -m benchmarks.memory --config=configs/flash_base.py --out=benchmarks/memory/results/memory.jsonl \
        --config.model.max_length=8192 --config.data.tokens_per_batch=8192 --config.train.accumulate=1 \
        --config.model.remat=full

One model per process, since the operating system only reports the peak of a process.
"""

import argparse
import json
import pathlib
import resource

import jax

from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.config.experiment import parse
from flash_lm.families.family import complete_config
from flash_lm.runs.jsonl import append_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.timing.bare_step import BareStep
from flash_lm.timing.turns import make_turn


def main(argv: list[str]) -> None:
    """Appends one JSON line to OUT."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=main.__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    # One step in this process: peak memory is that of the process.
    step = BareStep(complete_config(parse(load_config(arguments.config, overrides))))
    step.start()
    first_step_ms = make_turn(step.step)()
    config = step.config
    # What XLA planned, and what the system saw.
    line = {
        "family": config.model.label,
        "parameters": step.parameters,
        "batch": config.data.batch_size,
        "length": config.data.length,
        "dtype": config.model.dtype,
        "remat": config.model.remat,
        "temp_bytes": step.temp_bytes,
        "peak_bytes": step.peak_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_step_s": first_step_ms / 1000,
        **provenance(jax.devices()[0].device_kind),
    }
    append_jsonl(arguments.out, [line])
    print(json.dumps(line, indent=2))


if __name__ == "__main__":
    run(main)
