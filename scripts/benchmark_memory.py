"""Peak memory of one training step, forward, backward and update, on random tokens.

    python scripts/benchmark_memory.py --config=configs/flash_base.py --out=results/trunk/memory.jsonl \
        --config.model.max_length=8192 --config.data.tokens_per_batch=8192 --config.train.accumulate=1 \
        --config.model.remat=full

One model a process, since the operating system tells a process's peak only.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import time

import jax
import jax.numpy as jnp

from flash_lm.analysis.results import append_jsonl
from flash_lm.command import load_config
from flash_lm.config import parse
from flash_lm.models.families import complete
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.state import ModelFunction, init_state
from flash_lm.training.step import make_train_step


def main() -> None:
    """Appends one JSON line to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args()
    config = parse(load_config(arguments.config, overrides))
    vocab_size = config.model.vocab_size or config.data.vocab_size
    model = ModelFunction(complete(dataclasses.replace(config.model, vocab_size=vocab_size)), config.seed)
    optimizer = make_optimizer(config.train)
    abstract = jax.eval_shape(lambda: init_state(model, optimizer))
    shape = (config.data.batch_size, config.data.length)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, vocab_size)
    batch = {
        "inputs_BxL": tokens,
        "targets_BxL": jnp.roll(tokens, -1, axis=1),
        "loss_mask_BxL": jnp.ones(shape),
        "segment_ids_BxL": jnp.ones(shape, jnp.int32),
        "positions_BxL": jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape),
    }
    step = jax.jit(make_train_step(model, optimizer, config.train, config.seed), donate_argnums=0)
    compiled = step.lower(abstract, batch).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend tells nothing of memory"
    state = jax.jit(lambda: init_state(model, optimizer))()
    start = time.perf_counter()
    state, metrics = compiled(state, batch)
    loss = float(metrics["loss"])
    line = {
        "family": config.model.family,
        "parameters": model.parameter_count(),
        "batch": shape[0],
        "length": shape[1],
        "dtype": config.model.dtype,
        "remat": config.model.remat,
        "temp_bytes": memory.temp_size_in_bytes,
        "state_bytes": memory.output_size_in_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_step_s": time.perf_counter() - start,
        "loss": loss,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    append_jsonl(arguments.out, [line])
    print(json.dumps(line, indent=2))


if __name__ == "__main__":
    main()
