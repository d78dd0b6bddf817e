"""What a run will need, before it starts: its step is compiled for the devices, and nothing is computed or written."""

import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from flash_lm.config.experiment import Config, parse
from flash_lm.config.registry import TASKS
from flash_lm.data.expected import Expected, expected_corpus
from flash_lm.errors import InputError
from flash_lm.models.classifier import ClassOptions
from flash_lm.models.facts import training_flops
from flash_lm.runs.labels import read_labels
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import HUB
from flash_lm.training.ahead_of_time import chip_devices
from flash_lm.training.chips import CHIPS, find_chip
from flash_lm.training.compiled_step import state_bytes
from flash_lm.training.device import free_memory
from flash_lm.training.microbatches import fewest_that_fit, fill_microbatches
from flash_lm.training.resolve import fill_from_corpus, normalize
from flash_lm.training.resume import resolve_run
from flash_lm.training.setup import Setup, build_setup
from flash_lm.training.sharding import check_batch, make_abstract_mesh, make_mesh, mesh_shape
from flash_lm.training.step_memory import Memory, step_memory
from flash_lm.training.teacher_losses import TEACHER_LOSSES

_log = logging.getLogger(__name__)
# JAX takes this share of a GPU's memory when it starts, and no more later.
_GPU_FRACTION, _GPU_DEFAULT, _GPU_MOST = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75, 0.95


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices that a run is planned for.

    Attributes:
        name: a row of `CHIPS`; or JAX's name for this machine's devices, which have none.
        count: number of devices.
        devices: to compile for; empty: there is no compiler.
        is_here: whether the devices are this machine's.
        memory: bytes of a device that programs may take; None: unknown.
        fraction: their share of the chip's memory.
        why: why there is no compiler.
    """

    name: str
    count: int
    devices: tuple[Any, ...]
    is_here: bool
    memory: float | None
    fraction: float = 1.0
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will need.

    Attributes:
        config: the complete config.
        target: the devices.
        mesh: number of devices along each axis.
        parameters: number of parameters.
        step_flops: model FLOPs of a step, see `training_flops`; with a teacher also those of the teacher.
        memory: of each device.
    """

    config: Config
    target: Target
    mesh: Mapping[str, int]
    parameters: int
    step_flops: float
    memory: Memory

    @property
    def rows(self) -> int:
        """Number of sequences in a microbatch of one device."""
        return self.config.data.batch_size // (self.mesh["data"] * self.mesh["fsdp"] * self.config.train.microbatches)

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into a device's memory; None: unknown."""
        memory, room = self.memory, self.target.memory
        if memory.refused:
            return False
        if memory.total is not None and self.target.name.startswith("TPU"):
            return True  # its compiler refuses what does not fit, and knows the memory better than the table
        if room is None:
            return None
        if memory.total is None:
            return False if memory.state > room else None
        return memory.total <= room

    @property
    def peak(self) -> float | None:
        """Peak rate of a device's products in FLOP/s, in the model's dtype; None: unknown."""
        chip = CHIPS.get(self.target.name)
        return chip.peak_flops(self.config.model.dtype) if chip else None

    @property
    def flops(self) -> float:
        """Model FLOPs of all steps."""
        return self.config.train.steps * self.step_flops

    def advice(self) -> list[str]:
        """What makes a step that does not fit smaller, the least costly first."""
        remat, memory, count = self.config.model.remat, self.memory, self.target.count
        room = self.target.memory or math.inf
        of_steps = memory.state < room  # otherwise smaller steps do not help
        # A GPU's room may be made larger.
        most = room / self.target.fraction * _GPU_MOST
        ways = {
            f"{_GPU_FRACTION}={_GPU_MOST}": self.target.fraction < 1 and (memory.total or math.inf) <= most,
            "--config.model.remat=products": of_steps and remat == "none",
            f"--config.train.accumulate={self._enough_microbatches()}": of_steps and self.rows > 1,
            "--config.model.remat=full": of_steps and remat != "full",
            "--config.mesh.shape=1,-1,1 (fsdp)": count > self.mesh["fsdp"] and memory.state > room / 4,
            "more devices with fsdp": True,
        }
        return [way for way, helps in ways.items() if helps]

    def _enough_microbatches(self) -> int:
        """As many microbatches as fit, if temporary arrays shrink with them; else one a sequence."""
        state, temporary = self.memory.state, self.memory.temporary or 0
        shrunk = lambda count: Memory(state, temporary // count, state + temporary // count)
        count, _ = fewest_that_fit(self.rows, self.target.memory or math.inf, shrunk)
        return self.config.train.microbatches * count


def parse_target(text: str) -> Target:
    """The devices that --plan names: CHIP or CHIP:COUNT; empty: this machine's.

    Raises:
        InputError: no such chip, or COUNT is not a positive integer.
    """
    if not text:
        return this_machine()
    name, colon, number = text.rpartition(":") if ":" in text else (text, "", "1")
    if name not in CHIPS:
        raise InputError(f"--plan={text}: {name} is not in the table of chips: give one of {', '.join(CHIPS)}")
    if not (number.isdecimal() and int(number)):
        raise InputError(f"--plan={text}: give CHIP{colon}COUNT with a positive number of devices, such as {name}:8")
    count, fraction = int(number), 1.0
    if not name.startswith("TPU"):
        fraction = _gpu_fraction()
    devices, why = (), ""
    try:
        devices = tuple(chip_devices(name, count))
    except InputError as error:
        why = str(error)
    return Target(name, count, devices, False, CHIPS[name].memory * 1e9 * fraction, fraction, why)


def _gpu_fraction() -> float:
    """The share of a GPU's memory that JAX takes."""
    text = os.environ.get(_GPU_FRACTION, str(_GPU_DEFAULT))
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{_GPU_FRACTION}={text} must be a number, such as {_GPU_DEFAULT}") from None


def this_machine() -> Target:
    """The devices of this machine, with what is free of their memory."""
    devices, memory = tuple(jax.devices()), free_memory()
    if memory is not None and devices[0].platform == "cpu":
        memory //= len(devices)  # simulated devices share the machine's
    kind = devices[0].device_kind
    return Target(find_chip(kind) or kind, len(devices), devices, True, memory)


def plan_config(asked: Any, workdir: pathlib.Path, count: int) -> Config:
    """The complete config of a run on `count` devices, as far as it is known before the corpus is read.

    Args:
        asked: the user's config.
        workdir: the run's folder, which is only read; open keys are those of its run, if it has one.
        count: number of devices.

    Raises:
        InputError: a bad config; or a size is open that only the corpus has.
    """
    asked = normalize(asked)
    parse(asked)  # raises, with every problem
    for key in ("init_from", "teacher"):
        if str(asked.train[key] or "").startswith(HUB):
            raise InputError(
                f"train.{key}={asked.train[key]} would be downloaded, and a plan downloads nothing: leave it open, "
                f"with --config.train.{key}="
            )
    # An open batch depends on the devices, of which this machine may have others.
    asked.mesh.shape = mesh_shape(asked.mesh.shape, count)
    run = resolve_run(RunFolder(workdir), asked)
    known = run.known_corpus()
    if known and known.tokenizer:
        return _fill(run.config, Expected.of(known.tokenizer, read_labels(workdir)))
    return _fill(run.config, expected_corpus(run.config.data))


def _fill(config: Config, expected: Expected) -> Config:
    """Fills in the sizes that the corpus defines.

    Raises:
        InputError: only the corpus has them, or they do not fit together.
    """
    task, labels, count = TASKS[config.task], expected.labels, config.model[ClassOptions].count
    advice = f"data.corpus={config.data.corpus} defines it when it is read: set it for the plan, with --config."
    problems = []
    if expected.vocab_size is None:
        if config.model.vocab_size is None:
            problems.append(f"model.vocab_size is open, and {advice}model.vocab_size=")
        expected = expected._replace(vocab_size=config.model.vocab_size)
    if task.labels and not labels:
        if count is None:
            problems.append(f"model.classes.count is open, and {advice}model.classes.count=")
        labels = tuple(map(str, range(count or 0)))
    if problems:
        raise InputError.of(problems)
    return fill_from_corpus(config, expected, labels)


def make_plan(config: Config, target: Target) -> Plan:
    """Computes a plan; compiles the step if there is a compiler.

    Args:
        config: a complete config, from `plan_config`.
        target: the devices.

    Raises:
        InputError: mesh, sharding rules or batch do not fit the number of devices.
    """
    mesh: Any = make_abstract_mesh(config.mesh, target.count)
    check_batch(mesh, config.data.batch_size, config.train.accumulate, config.data.length)
    if target.devices:
        mesh = make_mesh(config.mesh, list(target.devices))
    setup = build_setup(config, mesh)
    memory = Memory(state_bytes(setup))
    if target.devices:
        _log.info("compiling the step for %d x %s, which may take minutes", target.count, target.name)
        setup, memory = fill_microbatches(setup, target.memory)
        memory = memory or step_memory(setup)
    return Plan(setup.config, target, dict(mesh.shape), setup.model.parameter_count(), step_flops(setup), memory)


def step_flops(setup: Setup) -> float:
    """Model FLOPs of a step."""
    config, model = setup.config, setup.model.abstract
    tokens, length = config.data.tokens_per_batch, config.data.length
    if setup.teacher is None:
        return training_flops(model, tokens, length)
    return tokens * TEACHER_LOSSES[config.train.teacher_loss].flops(model, setup.teacher.model.abstract, length)
