"""The memory of a training step on each device, from the program that XLA compiles for it."""

import re
from typing import Any, NamedTuple

import jax

from flash_lm.training.compiled_step import lower_step, program_bytes, state_bytes
from flash_lm.training.compiler_options import compile_for
from flash_lm.training.setup import Setup

# XLA's messages if a step does not fit on a TPU: bytes of the temporary arrays, or of everything.
_TEMPORARY = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM")
_EVERYTHING = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Memory(NamedTuple):
    """Bytes on each device.

    Attributes:
        state: of the train state: parameters, the optimizer's moments and the like.
        temporary: of a step's other arrays; None: unknown.
        total: of everything; None: unknown.
        refused: whether the compiler found that the step does not fit.
    """

    state: int
    temporary: int | None = None
    total: int | None = None
    refused: bool = False


def step_memory(setup: Setup) -> Memory:
    """Compiles the step for the devices of a setup's mesh, which need not be here, and reads what it needs."""
    state = state_bytes(setup)
    with jax.set_mesh(setup.mesh):
        lowered = lower_step(setup)
        try:
            program = compile_for(lowered, setup.mesh.devices.flat[0])
        except jax.errors.JaxRuntimeError as error:
            if (memory := _refused(str(error), state)) is None:
                raise
            return memory
    return program_memory(setup, program)


def program_memory(setup: Setup, program: Any) -> Memory:
    """What a compiled step needs."""
    analysis: Any = program.memory_analysis()
    return Memory(state_bytes(setup), analysis.temp_size_in_bytes, program_bytes(program))


def _refused(message: str, state: int) -> Memory | None:
    """What XLA says of a step that does not fit; None: its message is about something else."""
    if match := _TEMPORARY.search(message):
        temporary = int(float(match[1]) * _UNITS[match[2]])
        return Memory(state, temporary, state + temporary, refused=True)
    if match := _EVERYTHING.search(message):
        total = int(float(match[1]) * _UNITS[match[2]])
        return Memory(state, max(total - state, 0), total, refused=True)
    return None
