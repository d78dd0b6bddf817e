"""The train step, compiled, and the schedule of its learning rate beside it."""

from typing import Any

import jax
import jax.numpy as jnp

from flash_lm.config.registry import TASKS
from flash_lm.data.packing import empty_row
from flash_lm.training.forward import Batch
from flash_lm.training.schedule import learning_rate
from flash_lm.training.setup import Setup
from flash_lm.training.sharding import batch_sharding
from flash_lm.training.train_state import TrainState
from flash_lm.training.train_step import Metrics, make_train_step


def shapes_of_batch(setup: Setup) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and shardings of a batch."""
    config, sharding = setup.config, batch_sharding(setup.mesh)
    arrays = {name: (x.shape, x.dtype) for name, x in empty_row(config.data.length).items()}
    arrays |= {name: (shape, jnp.int32) for name, shape in TASKS[config.task].added(config.data).items()}
    rows = config.data.batch_size
    return {
        name: jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding) for name, (shape, dtype) in arrays.items()
    }


class CompiledStep:
    """The train step for a setup's shapes and shardings; the state is donated.

    The schedule is a program of its own. So runs of other rates, budgets or schedules have the same `program`, which
    they find in the cache, and one that branches off goes on as its parent would have, to the bit.
    """

    def __init__(self, setup: Setup):
        """Compiles the step, or reads it from the cache."""
        config = setup.config
        step = make_train_step(setup.model, setup.optimizer, config.train, config.seed, TASKS[config.task])
        state, batch = jax.tree.map(lambda x: x.sharding, setup.abstract), shapes_of_batch(setup)
        rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=state.step)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(state, None))
        self.program: Any = jitted.lower(setup.abstract, batch, rate).compile()
        schedule = learning_rate(config.train)
        self._rate = jax.jit(lambda step: jnp.float32(schedule(step)), out_shardings=state.step)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The state after the batch, and the metrics of `make_train_step`."""
        return self.program(state, batch, self._rate(state.step))
