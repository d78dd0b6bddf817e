"""The compiled train step of several runs that differ only in seed and learning rate: `jax.vmap` over the runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flash_lm.config.registry import TASKS
from flash_lm.data.batches import Batch
from flash_lm.training.compiled_step import batch_shapes
from flash_lm.training.compiler_options import compile_for
from flash_lm.training.schedule import learning_rate
from flash_lm.training.setup import Setup
from flash_lm.training.train_state import TrainState
from flash_lm.training.train_step import Metrics, make_train_step


class VmappedStep:
    """One train step of all runs; every array of their states and batches has the run as its first axis.

    A run keeps its own parameters, optimizer state, constants of the model, dropout, learning rate and batches. The
    state is donated.
    """

    def __init__(self, setups: Sequence[Setup]):
        """Compiles the step.

        Args:
            setups: one for each run, in order; their configs differ in `seed` and `train.learning_rate` only.
        """
        first, count = setups[0], len(setups)
        config, task = first.config, TASKS[first.config.task]

        def step(state: TrainState, batch: Any, rate: jax.Array, seed: jax.Array) -> tuple[TrainState, Metrics]:
            model = first.model.replace_constants(state.constants)  # drawn from the run's seed
            return make_train_step(model, first.optimizer, config.train, seed, task)(state, batch, rate)

        # The shardings are those of a single run, with each array of a run on the devices that it would be on alone.
        abstract, batch = (_add_axis(shapes, count) for shapes in (first.abstract, batch_shapes(first)))
        shardings, replicated = jax.tree.map(lambda x: x.sharding, abstract), abstract.step.sharding
        of_runs = lambda dtype: jax.ShapeDtypeStruct((count,), dtype, sharding=replicated)
        jitted = jax.jit(jax.vmap(step), donate_argnums=0, out_shardings=(shardings, None))
        lowered = jitted.lower(abstract, batch, of_runs(jnp.float32), of_runs(jnp.uint32))
        self._program: Any = compile_for(lowered, first.mesh.devices.flat[0])
        self._batch_shardings = {name: x.sharding for name, x in batch.items()}

        # The runs' rates, functions of the steps alone, and their seeds; a key has 32 bits of a seed.
        schedules = [learning_rate(setup.config.train) for setup in setups]
        rates = lambda steps: jnp.stack([jnp.float32(rate(step)) for rate, step in zip(schedules, steps, strict=True)])
        self._rates = jax.jit(rates, out_shardings=replicated)
        seeds = np.array([setup.config.seed % 2**32 for setup in setups], np.uint32)
        self._seeds = jax.device_put(seeds, replicated)

        # From the states of single runs, and back.
        stack = lambda states: jax.tree.map(lambda *x: jnp.stack(x), *states)
        self._stack = jax.jit(stack, out_shardings=shardings)
        alone = jax.tree.map(lambda x: x.sharding, first.abstract)
        self._select = jax.jit(lambda states, run: jax.tree.map(lambda x: x[run], states), out_shardings=alone)

    def stack(self, states: Sequence[TrainState]) -> TrainState:
        """The states of single runs as one state; theirs are deleted."""
        stacked = self._stack(states)
        for leaf in jax.tree.leaves(states):
            leaf.delete()
        return stacked

    def select(self, states: TrainState, run: int) -> TrainState:
        """The state of a single run, in the order of the setups."""
        return self._select(states, run)

    def __call__(self, states: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics]:
        """The states after the batches, and the metrics of `make_train_step`, each with an axis of runs.

        Args:
            states: the states, from `stack` or the step before.
            batches: the next batch of each run.
        """
        stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
        batch = jax.device_put(stacked, self._batch_shardings)
        return self._program(states, batch, self._rates(states.step), self._seeds)


def _add_axis(shapes: Any, count: int) -> Any:
    """Shapes and shardings with an axis of runs, which is not sharded, before the others."""

    def add(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding: Any = x.sharding
        stacked = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=stacked)

    return jax.tree.map(add, shapes)
