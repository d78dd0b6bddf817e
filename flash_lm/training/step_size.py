"""What a step takes, said before the first one; and what to change if it does not fit."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from flash_lm.data.tokenising_progress import in_bytes
from flash_lm.errors import RunError
from flash_lm.training.compiled_step import state_bytes
from flash_lm.training.plan import Plan, step_flops, this_machine
from flash_lm.training.setup import Setup
from flash_lm.training.step_memory import Memory, program_memory

_EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


def plan_of(setup: Setup, program: Any = None, taken: int = 0) -> Plan:
    """The plan of a run that is about to begin on this machine.

    Args:
        setup: of the run.
        program: its compiled step; None: it is not compiled yet.
        taken: bytes of each device that its state takes already, and that a step may have.
    """
    memory = program_memory(setup, program) if program else Memory(state_bytes(setup))
    mesh, target = dict(setup.mesh.shape), this_machine()
    if target.memory is not None:
        target = dataclasses.replace(target, memory=target.memory + taken)
    return Plan(setup.config, target, mesh, setup.model.parameter_count(), step_flops(setup), memory)


def size_line(plan: Plan) -> str:
    """What a step takes, in one line."""
    data, room = plan.config.data, plan.target.memory
    work = f"{plan.step_flops:.3g} FLOPs per step of {data.tokens_per_batch:,} tokens"
    return f"memory per device: {_memory(plan.memory)}{f' of {in_bytes(int(room))} free' if room else ''}; {work}"


def _memory(memory: Memory) -> str:
    if memory.total is None or memory.temporary is None:
        return f"state {in_bytes(memory.state)}, and the arrays of a step"
    return f"state {in_bytes(memory.state)} + temporary arrays {in_bytes(memory.temporary)} = {in_bytes(memory.total)}"


@contextlib.contextmanager
def explain_out_of_memory(plan: Callable[[], Plan]) -> Iterator[None]:
    """Ends a run that a device has no memory for with one line: what it needs, and the keys that help, in order.

    Raises:
        RunError: a device is out of memory.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in _EXHAUSTED):
            raise
        raise RunError(_out_of_memory(plan())) from error


def _out_of_memory(plan: Plan) -> str:
    room = f" of {in_bytes(int(plan.target.memory))} that are free now" if plan.target.memory else ""
    ways = ", ".join([*plan.advice(), "--config.data.tokens_per_batch (fewer)"])
    return f"out of memory on {plan.target.name}: a step takes {_memory(plan.memory)}{room}: in this order try {ways}"
