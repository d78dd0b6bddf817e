"""The compiled train step, with the learning rate schedule as a separate program."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from flash_lm.config.registry import TASKS
from flash_lm.data.packing import empty_row
from flash_lm.training.compiler_options import compile_for
from flash_lm.training.forward import Batch
from flash_lm.training.schedule import learning_rate
from flash_lm.training.setup import Setup
from flash_lm.training.sharding import batch_sharding
from flash_lm.training.train_state import TrainState
from flash_lm.training.train_step import Metrics, make_train_step


def batch_shapes(setup: Setup) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and shardings of a batch."""
    config, sharding = setup.config, batch_sharding(setup.mesh)
    arrays = {name: (x.shape, x.dtype) for name, x in empty_row(config.data.length).items()}
    arrays |= {name: (shape, jnp.int32) for name, shape in TASKS[config.task].added(config.data).items()}
    rows = config.data.batch_size
    return {
        name: jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding) for name, (shape, dtype) in arrays.items()
    }


def lower_step(setup: Setup) -> jax.stages.Lowered:
    """Traces and lowers the step for a setup's shapes and shardings, on its mesh; the state is donated.

    Its inputs are the state, the batch, the learning rate, a float32 scalar, and the teacher's parameters if there is
    one.
    """
    config = setup.config
    teacher = setup.teacher and setup.teacher.model
    step = make_train_step(setup.model, setup.optimizer, config.train, config.seed, TASKS[config.task], teacher)
    # The state has the same shardings before and after the step.
    state, batch = jax.tree.map(lambda x: x.sharding, setup.abstract), batch_shapes(setup)
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=state.step)
    inputs = setup.abstract, batch, rate, *([setup.teacher.abstract] if setup.teacher else [])
    return jax.jit(step, donate_argnums=0, out_shardings=(state, None)).lower(*inputs)


def state_bytes(setup: Setup) -> int:
    """Bytes of the train state on each device, and of the teacher's parameters."""
    leaves = jax.tree.leaves((setup.abstract, setup.teacher and setup.teacher.abstract))
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)


def program_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that a program takes on each device: inputs, outputs and temporary arrays."""
    memory: Any = program.memory_analysis()
    # Outputs that take the place of donated inputs are counted once.
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + new_outputs + memory.temp_size_in_bytes


class CompiledStep:
    """The train step for a setup's shapes and shardings; the state is donated.

    The learning rate is an input, computed by a second small program. So runs that differ only in rate, budget or
    schedule share one `program` in the compilation cache, and a branch continues as its parent would have, to the bit.
    """

    def __init__(self, setup: Setup):
        """Compiles the step, or reads it from the compilation cache."""
        self.program: Any = compile_for(lower_step(setup), setup.mesh.devices.flat[0])

        self._teacher_params = [setup.teacher.params] if setup.teacher else []

        # The schedule, a function of the step alone.
        schedule = learning_rate(setup.config.train)
        rate = lambda step: jnp.float32(schedule(step))
        self._rate = jax.jit(rate, out_shardings=setup.abstract.step.sharding)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The state after the batch, and the metrics of `make_train_step`."""
        return self.program(state, batch, self._rate(state.step), *self._teacher_params)
