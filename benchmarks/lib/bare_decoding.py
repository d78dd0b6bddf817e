"""Decoding with random parameters after a synthetic context: what the benchmarks time."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from flash_lm.config.experiment import parse_model
from flash_lm.config.mesh import MeshConfig
from flash_lm.families.family import complete
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.engine import Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.layers.mixed_chunk_core import ChunkOptions
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.training.sharding import make_mesh
from flash_lm.training.train_state import ModelFunction

_GREEDY = SamplingArrays.from_sampling(Sampling(temperature=0))


class BareDecoding:
    """A family with random parameters that never ends a text.

    Attributes:
        family: of the model, or what it is called beside others of it.
        function: the model.
        parameters: number of scalars.
        weight_bytes: of the parameters that a token reads whole; of a table of positions it reads a row.
        engine: that decodes with them, on one device.
    """

    def __init__(self, config: ConfigDict, family: str, longest: int, name: str | None = None):
        """Draws the parameters.

        Args:
            config: whose `model` it is.
            family: takes the place of the config's.
            longest: tokens that the positions reach.
            name: in tables; None: that of the family.
        """
        raw: Any = config.copy_and_resolve_references().model
        raw.update(family=family, max_length=longest, causal=True)
        self.family, self.function = name or family, ModelFunction(complete(parse_model(raw)), seed=0)
        self.parameters = self.function.parameter_count()
        abstract = jax.eval_shape(self.function.init)
        read = [x for x in jax.tree.leaves(abstract) if longest not in x.shape]
        self.weight_bytes = sum(x.size * x.dtype.itemsize for x in read)
        self._params = DecodeParams(self.function, jax.jit(self.function.init)())
        mesh = make_mesh(MeshConfig(shape=(1, 1, 1), rules=()), jax.devices()[:1])
        never_ends = np.arange(self.function.config.vocab_size) != 0
        self.engine = Engine(self._params, mesh, end=0, allowed_V=never_ends)
        self._last = jax.jit(self._last_token)

    def tokens_a_turn(self, tokens: int) -> int:
        """As many as a chunk has where a state does not grow, so that each share of a chunk's fold is counted once."""
        return tokens if self.engine.grows else self.function.config[ChunkOptions].size

    def stepper(self, rows: int, context: int, tokens: int) -> Callable[[], float]:
        """Generates the last tokens of a synthetic context; each call gives milliseconds.

        The state of the context is made by setting its counter: what is in it does not change the work.
        """

        def turn() -> float:
            # A state of its own, so that no two of the large ones exist at the same time.
            carry = self.engine.unstack(self.engine.start(rows, context))
            positions_B = jnp.full(rows, context - tokens, jnp.int32)
            carry = dataclasses.replace(carry, state=dataclasses.replace(carry.state, positions_B=positions_B))
            jax.block_until_ready(carry)
            start = time.perf_counter()
            carry, _ = self.engine.advance(carry, _GREEDY, 0, tokens)
            jax.block_until_ready(carry)
            return 1000 * (time.perf_counter() - start)

        return turn

    def recomputer(self, rows: int, context: int) -> Callable[[], float]:
        """One token by the parallel form over the whole prefix; each call gives milliseconds."""
        inputs_BxL = jnp.ones((rows, context), jnp.int32)

        def turn() -> float:
            start = time.perf_counter()
            jax.block_until_ready(self._last(self._params.unstacked, inputs_BxL))
            return 1000 * (time.perf_counter() - start)

        return turn

    def _last_token(self, params, inputs_BxL):
        bound = self._params.bind(params)
        return bound.logits(bound.features(ModelInputs(inputs_BxL))[:, -1]).argmax(axis=-1)
