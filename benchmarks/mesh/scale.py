"""Memory and traffic per device of a training step on many devices, which is only compiled: no device is needed.

    python -m benchmarks.mesh.scale --devices=64 --shapes="64,1,1 1,64,1 8,4,2" --sizes="110M 731M" \
        --families="transformer_plus_plus flash" --length=8192 --out=benchmarks/mesh/results/scale.jsonl
    python -m benchmarks.mesh.scale --chip="TPU v5e" --devices=64 …    # with that chip's compiler: pip install libtpu

One line per size, family and mesh: bytes per device of state and temporary arrays, collectives and their bytes. Without
--chip the CPU's compiler takes the place of an accelerator's: it fuses less, adds up in float32, and all-reduces what
the others reduce and scatter, so temporary and sent bytes are upper bounds. The state is exact.
"""

import argparse
import pathlib
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from benchmarks.lib.collectives import count_collectives
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import mesh_shapes, positive, split_words
from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.families.family import complete_config
from flash_lm.runs.jsonl import Line, append_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.training.ahead_of_time import chip_devices, compile_for, compiler
from flash_lm.training.chips import CHIPS
from flash_lm.training.compiled_step import lower_step, state_bytes
from flash_lm.training.setup import Setup, build_setup
from flash_lm.training.sharding import check_batch, make_mesh

# Sizes of the FLASH paper: name -> layers, width, heads.
SIZES = {"110M": (12, 768, 12), "336M": (24, 1024, 16), "731M": (24, 1536, 24)}


def make_setup(
    config: ConfigDict,
    family: str,
    size: str,
    shape: tuple[int, ...],
    length: int,
    rows: int,
    devices: list[Any] | None = None,
) -> Setup:
    """Builds the setup of a family and size on a mesh, with `rows` sequences per device of the batch's axes.

    `devices`: to compile for; None: this machine's.
    """
    changed: Any = config.copy_and_resolve_references()
    layers, dim, heads = SIZES[size]
    changed.model.update(family=family, num_layers=layers, model_dim=dim, num_heads=heads, max_length=length)
    changed.mesh.shape = shape
    parts = changed.mesh.shape[0] * changed.mesh.shape[1]
    changed.data.update(length=length, tokens_per_batch=rows * parts * length)
    changed.train.accumulate = 1
    completed = complete_config(parse(changed))
    mesh = make_mesh(completed.mesh, devices)
    check_batch(mesh, completed.data.batch_size, 1)
    return build_setup(completed, mesh)


def measure(setup: Setup) -> Line:
    """Compiles the step; returns a line with its memory and collectives."""
    # Compile for the simulated mesh, without running.
    start = time.perf_counter()
    with jax.set_mesh(setup.mesh):
        program: Any = compile_for(lower_step(setup), setup.mesh.devices.flat[0])
    # Read collectives and memory from the program.
    traffic, memory = count_collectives(program.as_text(), setup.mesh.size), program.memory_analysis()
    return {
        "family": setup.config.model.label,
        "parameters": setup.model.parameter_count(),
        "mesh": "x".join(map(str, setup.mesh.devices.shape)),
        "devices": setup.mesh.size,
        "length": setup.config.data.length,
        "tokens_a_step": setup.config.data.tokens_per_batch,
        "state_bytes_a_device": state_bytes(setup),
        "temporary_bytes_a_device": memory.temp_size_in_bytes,
        "collectives_a_step": sum(x.count for x in traffic.values()),
        "collective_bytes_a_step": sum(x.bytes for x in traffic.values()),
        "sent_bytes_a_step": sum(x.sent for x in traffic.values()),
        **{f"{kind}_{key}": value for kind, x in traffic.items() for key, value in x._asdict().items()},
        "compile_s": time.perf_counter() - start,
    }


def main(argv: list[str]) -> None:
    """Appends one JSON line per size, family and mesh to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/flash_base.py")
    parser.add_argument("--chip", choices=list(CHIPS), help="to compile for; default: devices that the CPU simulates")
    parser.add_argument("--devices", type=positive, default=8, help="number of devices")
    parser.add_argument("--shapes", required=True, help="meshes (data, fsdp, tensor)")
    parser.add_argument("--sizes", default=" ".join(SIZES), help="separated by spaces or commas")
    parser.add_argument("--families", default="transformer_plus_plus flash", help="separated by spaces or commas")
    parser.add_argument("--length", type=positive, default=8192)
    parser.add_argument("--rows", type=positive, default=1, help="sequences per device of the batch's axes")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    config, sizes = load_config(arguments.config, overrides), split_words(arguments.sizes)
    if unknown := [size for size in sizes if size not in SIZES]:
        raise InputError(f"--sizes={' '.join(unknown)}: must be among {', '.join(SIZES)}")
    jax.config.update("jax_num_cpu_devices", 1 if arguments.chip else arguments.devices)
    devices = chip_devices(arguments.chip, arguments.devices) if arguments.chip else None
    about: Line = {"chip": arguments.chip or "CPU", "compiler": compiler(arguments.chip)}
    about |= provenance(jax.devices()[0].device_kind)
    # Compile each size and family for each mesh, and append its line.
    for size in sizes:
        for family in split_words(arguments.families):
            for shape in mesh_shapes(arguments.shapes, "--shapes"):
                setup = make_setup(config, family, size, shape, arguments.length, arguments.rows, devices)
                line: Line = {"size": size} | measure(setup)
                append_jsonl(arguments.out, [line | about])
                print(
                    f"{size} {family} {line['mesh']}: {line['state_bytes_a_device'] / 1e9:.2f} GB of state and "
                    f"{line['temporary_bytes_a_device'] / 1e9:.2f} GB of temporary arrays per device, "
                    f"{line['collectives_a_step']} collectives, {line['sent_bytes_a_step'] / 1e9:.3f} GB sent a step",
                    flush=True,
                )


if __name__ == "__main__":
    run(main)
