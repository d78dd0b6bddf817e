"""Traffic of a training step between devices on several meshes; also shows that the losses stay the same.

    python -m benchmarks.mesh.traffic --devices=8 --shapes="8,1,1 1,8,1 2,2,2" \
        --out=benchmarks/mesh/results/traffic.jsonl [--config.model.family=flash …]

Without accelerators the CPU simulates the devices. Collectives and bytes are then real. Times are not, and are omitted.
"""

import argparse
import pathlib

import jax
from ml_collections import ConfigDict

from benchmarks.lib.collectives import count_collectives
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import mesh_shapes
from flash_lm.config.experiment import parse
from flash_lm.runs.jsonl import append_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.training.ahead_of_time import compiler
from flash_lm.training.compiled_step import CompiledStep
from flash_lm.training.resume import new_state
from flash_lm.training.setup import build_experiment
from flash_lm.training.sharding import batch_sharding, check_batch, shard_batch


def measure(config: ConfigDict, steps: int) -> dict:
    """Returns a flat line: the mesh, its collectives, bytes per device, and the losses of the first steps."""
    experiment = build_experiment(parse(config))
    settings = experiment.config
    check_batch(experiment.mesh, settings.data.batch_size, settings.train.accumulate)
    with jax.set_mesh(experiment.mesh):
        step, state = CompiledStep(experiment), new_state(experiment)
        # Bytes of the sharded state, before the first step donates it.
        bytes_per_device = {
            f"{name}_bytes_a_device": sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
            for name, tree in (("parameter", state.params), ("optimizer", state.opt_state))
        }
        # Losses of the first steps.
        share, losses = experiment.share(), []
        batches = experiment.training_batches(share)
        for _ in range(steps):
            state, metrics = step(state, shard_batch(next(batches), batch_sharding(experiment.mesh), share))
            losses.append(float(metrics["loss"]))
    # Collectives of the compiled step.
    traffic = count_collectives(step.program.as_text(), experiment.mesh.size)
    return {
        "family": settings.model.label,
        "task": settings.task,
        "mesh": "x".join(map(str, experiment.mesh.devices.shape)),
        "devices": experiment.mesh.size,
        "rows": settings.data.batch_size,
        "length": settings.data.length,
        "parameters": experiment.model.parameter_count(),
        **bytes_per_device,
        "temporary_bytes_a_device": step.program.memory_analysis().temp_size_in_bytes,
        "collectives_a_step": sum(x.count for x in traffic.values()),
        "collective_bytes_a_step": sum(x.bytes for x in traffic.values()),
        "sent_bytes_a_step": sum(x.sent for x in traffic.values()),
        **{f"{kind}_{key}": value for kind, x in traffic.items() for key, value in x._asdict().items()},
        "steps": steps,
        "losses": losses,
        "platform": jax.devices()[0].platform,
        "compiler": compiler(None),
        **provenance(jax.devices()[0].device_kind),
    }


def main(argv: list[str]) -> None:
    """Appends one JSON line per mesh to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--devices", type=int, default=8, help="devices to simulate on the CPU, without an accelerator")
    parser.add_argument("--shapes", default="8,1,1 1,8,1 2,2,2", help="meshes (data, fsdp, tensor)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    lines = []
    for shape in mesh_shapes(arguments.shapes, "--shapes"):
        config = load_config(arguments.config, [*overrides, f"--config.mesh.shape={shape}"])
        lines.append(measure(config, arguments.steps))
        line = lines[-1]
        print(
            f"{line['family']} {line['mesh']}: {line['collectives_a_step']} collectives, "
            f"{line['collective_bytes_a_step'] / 1e6:.2f} MB per step; {line['parameter_bytes_a_device'] / 1e6:.2f} MB "
            f"of parameters per device; loss {line['losses'][0]:.5f} … {line['losses'][-1]:.5f}"
        )
    append_jsonl(arguments.out, lines)


if __name__ == "__main__":
    run(main)
