"""The bare training step on random tokens that are already on the device, for benchmarks."""

import time
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from flash_lm.config.experiment import Config, parse
from flash_lm.config.registry import HEADS, TASKS
from flash_lm.families.family import complete_config
from flash_lm.models.facts import training_flops
from flash_lm.ops.implementations import recorded
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.train_state import ModelFunction, init_state
from flash_lm.training.train_step import make_scheduled_step


def step_config(
    config: ConfigDict, family: str, length: int, *, tokens_per_step: int, dtype: str, task: str = "causal_lm"
) -> Config:
    """Returns the config of a family with sequences of `length` tokens, and one batch of all the step's tokens.

    Raises:
        InputError: lists everything that is wrong.
    """
    changed: Any = config.copy_and_resolve_references()
    changed.task = task
    changed.model.update(family=family, max_length=length, dtype=dtype)
    changed.data.update(length=length, tokens_per_batch=tokens_per_step)
    changed.train.accumulate = 1
    return complete_config(parse(changed))


class BareStep:
    """A config's training step, forward, backward and update, compiled for one device.

    Attributes:
        config: the complete config.
        parameters: number of parameters.
        compile_s: seconds that tracing and compiling took.
        temp_bytes: bytes of temporary arrays, from XLA's memory plan.
        peak_bytes: bytes of all arrays during a step: state, batch and temporary arrays.
        model_flops: model FLOPs of a step, see `models.facts`.
        kernels: whether the step uses Pallas kernels.
        implementations: what its parts use, as the lines of a run say it.
    """

    def __init__(self, config: Config):
        """Compiles the step; allocates no large arrays. `config`: from `complete_config`."""
        self.config = config
        packed, few_targets = config.data.packed, config.few_targets
        model = ModelFunction(config.model, config.seed, packed=packed, few_targets=few_targets)
        optimizer = make_optimizer(config.train, model.traits())
        self.parameters = model.parameter_count()
        tokens = config.data.batch_size * config.data.length
        self.model_flops = training_flops(model.abstract, tokens, config.data.length)
        self._init = lambda: init_state(model, optimizer, config.carried_rows, config.train.ema > 0)
        step = make_scheduled_step(model, optimizer, config.train, config.seed, TASKS[config.task])
        step = jax.jit(step, donate_argnums=0)
        start = time.perf_counter()
        with recorded() as self.implementations:
            traced = step.trace(jax.eval_shape(self._init), jax.eval_shape(self._batch))
        self._compiled = traced.lower().compile()
        self.compile_s = time.perf_counter() - start
        self.kernels = "pallas_call" in str(traced.jaxpr)
        memory: Any = self._compiled.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes
        persistent = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        self.peak_bytes = persistent + self.temp_bytes
        self._started: tuple | None = None  # state and batch

    def start(self) -> None:
        """Initialises the parameters and samples the tokens."""
        self._started = jax.block_until_ready((jax.jit(self._init)(), jax.jit(self._batch)()))

    def step(self) -> float:
        """Runs one step from the current state, waits for it, and returns the loss."""
        assert self._started is not None, "call start first"
        state, batch = self._started
        state, metrics = self._compiled(state, batch)
        self._started = jax.block_until_ready(state), batch
        return float(metrics["loss"])

    def _batch(self) -> dict[str, Any]:
        """Returns a batch of full sequences of one document each; masked models predict a share of the tokens."""
        data = self.config.data
        shape = (data.batch_size, data.length)
        tokens_key, mask_key = jax.random.split(jax.random.key(self.config.seed))
        model, task = self.config.model, TASKS[self.config.task]
        tokens_BxL = jax.random.randint(tokens_key, shape, 0, model.vocab_size)
        share = task.share(*(data[section] for section in task.sections))
        targets_BxL = jnp.roll(tokens_BxL, -1, axis=1) if task.causal else tokens_BxL
        chosen_BxL = jax.random.uniform(mask_key, shape) < share
        # Sources and prefixes: half of the sequence, or a source as long as it.
        sources = {
            name: jnp.full((data.batch_size, *size), task.conditioning.fill_value(data.length), jnp.int32)
            for name, size in task.added(data).items()
        }
        return {
            "segment_ids_BxL": jnp.ones(shape, jnp.int32),
            "inputs_BxL": tokens_BxL,
            "targets_BxL": targets_BxL % HEADS[model.head].outputs(model) if task.labels else targets_BxL,
            "loss_mask_BxL": chosen_BxL.astype(jnp.float32),
            "positions_BxL": jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape),
            **sources,
        }
