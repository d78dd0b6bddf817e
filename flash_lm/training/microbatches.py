"""The number of microbatches of a run that leaves it open: as few as fit into the memory of its devices."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from flash_lm.ops.on_mesh import row_shards
from flash_lm.runs.hosts import gather_from_hosts
from flash_lm.training.device import free_memory
from flash_lm.training.setup import Setup
from flash_lm.training.sharding import check_batch
from flash_lm.training.step_memory import Memory, step_memory

_log = logging.getLogger(__name__)
AnySetup = TypeVar("AnySetup", bound=Setup)
_FEW_TOKENS = 1 << 14  # of a microbatch on a CPU, whose memory is then not asked for: most runs there are small
_USED = 0.95  # of the memory: allocations leave gaps


def fill_microbatches(
    setup: AnySetup,
    room: float | None = None,
    *,
    taken: int = 0,
    known: dict[str, Any] | None = None,
    runs: int = 1,
) -> tuple[AnySetup, Memory | None]:
    """The setup with its number of microbatches, if that is open, and the memory of its step, if that was asked for.

    Args:
        setup: with devices to compile for.
        room: bytes of a device that the step may take; None: what is free on this machine's, on all hosts.
        taken: bytes of a device that the state takes already, if `room` is None.
        known: what a checkpoint has recorded, see `record`; its number is kept on as many devices of the same kind.
        runs: number of runs that are trained together on the devices.

    Raises:
        InputError: the batch does not divide over the devices.
    """
    if setup.config.train.accumulate is not None:
        return setup, None
    config, mesh = setup.config, setup.mesh
    check_batch(mesh, config.data.batch_size, 1, config.data.length)
    if known and known == record(_with(setup, known["count"])):
        return _with(setup, known["count"]), None
    rows = config.data.batch_size // row_shards(mesh)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if room is None and not (on_cpu and runs * rows * config.data.length <= _FEW_TOKENS):
        room = _free_of_each(len(mesh.local_devices) if on_cpu else 1, taken)
    if room is None or rows == 1:  # nothing is known, little is needed, or nothing can be chosen
        return _with(setup, 1), None
    memory_of = lambda count: _largest_of_hosts(step_memory(_with(setup, count)))
    count, memory = fewest_that_fit(rows, _USED * room / runs, memory_of)
    _log.info(
        "train.accumulate is open: %d microbatch%s of %d sequences per device, which take %.1f of %.1f GB",
        count,
        "es" if count > 1 else "",
        rows // count,
        (memory.total or 0) * runs / 1e9,
        room / 1e9,
    )
    return _with(setup, count), memory


def record(setup: Setup) -> dict[str, Any]:
    """What a checkpoint records of the microbatches, so that a run continues with as many on the same devices."""
    mesh = setup.mesh
    return {
        "count": setup.config.train.microbatches,
        "rows": setup.config.data.batch_size // row_shards(mesh),
        "device": mesh.devices.flat[0].device_kind,
    }


def fewest_that_fit(rows: int, room: float, memory_of: Callable[[int], Memory]) -> tuple[int, Memory]:
    """The smallest divisor of `rows` whose microbatches fit; `rows` itself if none does.

    Args:
        rows: sequences of a batch on each device.
        room: bytes of a device.
        memory_of: of a step with so many microbatches; each call compiles one.
    """
    counts = [n for n in range(1, rows + 1) if rows % n == 0]
    count = 1
    while True:
        memory = memory_of(count)
        if (not memory.refused and (memory.total or 0) <= room) or count == rows:
            return count, memory
        # At best, temporary arrays shrink with the sequences, so no smaller count can fit.
        least = count * (memory.temporary or 0) / max(room - memory.state, 1)
        count = next((n for n in counts if n > count and n >= least), rows)


def _free_of_each(devices: int, taken: int) -> float | None:
    """Bytes of each device that are free or taken by the state, the least of all hosts; None: some host does not know.

    `devices`: of this host, that share its memory.
    """
    free = free_memory()
    rooms = gather_from_hosts(None if free is None else free / devices + taken)
    return None if None in rooms else min(rooms)


def _largest_of_hosts(memory: Memory) -> Memory:
    """The largest memory of all hosts, whose compilers may choose differently, and so all hosts choose alike."""
    return max((Memory(*values) for values in gather_from_hosts(memory)), key=lambda x: (x.refused, x.total or 0))


def _with(setup: AnySetup, count: int) -> AnySetup:
    train = dataclasses.replace(setup.config.train, accumulate=count)
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, train=train))
