"""Measures how long a save interrupts training, in seconds and as a share of the config's interval.

    python -m benchmarks.checkpoints.saves --config=configs/flash_base.py --config.data.tokens_per_batch=4096 \
        --config.train.accumulate=1 --out=benchmarks/checkpoints/results/saves.jsonl

`blocked_s` is the call of `save`: checksums and a copy of the state. `written_s` is the time until the files are
complete; threads do the rest while training goes on. Both are also reported as shares of the config's interval.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import jax

from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.config.experiment import parse
from flash_lm.families.family import complete_config
from flash_lm.runs.jsonl import Line, append_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.compiled_step import CompiledStep, batch_shapes
from flash_lm.training.resume import new_state
from flash_lm.training.setup import Setup, build_setup
from flash_lm.training.sharding import check_batch, make_mesh


def measure(setup: Setup, rounds: int, workdir: pathlib.Path) -> Line:
    """Returns medians over rounds of a step and a save of its state; the first round is the warm-up."""
    data, every = setup.config.data, setup.config.train.checkpoint_every
    times = []
    with jax.set_mesh(setup.mesh), Checkpoints(workdir) as checkpoints:
        step, state = CompiledStep(setup), new_state(setup)
        shapes = batch_shapes(setup)
        batch = {name: jax.device_put(jax.numpy.zeros(x.shape, x.dtype), x.sharding) for name, x in shapes.items()}
        # Time a step, the blocking call of save, and the time until the files are complete.
        for number in range(rounds + 1):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            stepped = time.perf_counter()
            checkpoints.save(number, state, {}, None)
            saved = time.perf_counter()
            checkpoints.wait()
            times.append((stepped - start, saved - stepped, time.perf_counter() - stepped))
    step_s, blocked_s, written_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {
        "family": setup.config.model.label,
        "parameters": setup.model.parameter_count(),
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        "tokens_a_step": data.tokens_per_batch,
        "checkpoint_every": every,
        "step_s": step_s,
        "blocked_s": blocked_s,
        "written_s": written_s,
        "blocked_share": blocked_s / (every * step_s),
        "written_share": written_s / (every * step_s),
    }


def main(argv: list[str]) -> None:
    """Appends one JSON line to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/flash_base.py")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    config = complete_config(parse(load_config(arguments.config, overrides)))
    mesh = make_mesh(config.mesh)
    check_batch(mesh, config.data.batch_size, config.train.accumulate)
    setup = build_setup(config, mesh)
    with tempfile.TemporaryDirectory() as folder:
        line = measure(setup, arguments.rounds, pathlib.Path(folder))
    append_jsonl(arguments.out, [line | provenance(jax.devices()[0].device_kind)])
    print(
        f"{line['parameters'] / 1e6:.0f}M parameters: a save blocks for {line['blocked_s']:.2f} s, is complete after "
        f"{line['written_s']:.1f} s; every {line['checkpoint_every']} steps of {line['step_s']:.2f} s that is "
        f"{line['blocked_share']:.4%} of the time"
    )


if __name__ == "__main__":
    run(main)
