"""Decoding with random parameters after a synthetic context, for benchmarks."""

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
        family: name of the family, or of its variant.
        function: the model.
        parameters: number of scalars.
        weights: number of those that each token reads; tables of positions are not counted.
        weight_bytes: their bytes.
        engine: the engine that decodes with them, on one device.
    """

    def __init__(self, config: ConfigDict, family: str, longest: int, name: str | None = None):
        """Draws the parameters.

        Args:
            config: config with the `model`.
            family: replaces the config's family.
            longest: longest context, in tokens.
            name: name in tables; None: that of the family.
        """
        raw: Any = config.copy_and_resolve_references().model
        raw.update(family=family, max_length=longest, causal=True)
        self.family, self.function = name or family, ModelFunction(complete(parse_model(raw)), seed=0)
        self.parameters = self.function.parameter_count()
        abstract = jax.eval_shape(self.function.init)
        read = [x for x in jax.tree.leaves(abstract) if longest not in x.shape]
        self.weights = sum(x.size for x in read)
        self.weight_bytes = sum(x.size * x.dtype.itemsize for x in read)
        self._params = DecodeParams(self.function, jax.jit(self.function.init)())
        mesh = make_mesh(MeshConfig(shape=(1, 1, 1), rules=()), jax.devices()[:1])
        never_ends = np.arange(self.function.config.vocab_size) != 0
        self.engine = Engine(self._params, mesh, end=0, allowed_V=never_ends)
        self._last = jax.jit(self._last_token)

    def tokens_per_turn(self, tokens: int) -> int:
        """Returns the tokens to generate per turn: a full chunk where the state does not grow.

        So the work of folding a finished chunk into the state is counted once per chunk.
        """
        return tokens if self.engine.grows else self.function.config[ChunkOptions].size

    def make_decode_turn(self, rows: int, context: int, tokens: int) -> Callable[[], float]:
        """Returns a turn that generates the last tokens of a synthetic context, in milliseconds."""
        return make_decode_turn(self.engine, rows, context, tokens)

    def make_recompute_turn(self, rows: int, context: int) -> Callable[[], float]:
        """Returns a turn that computes one token by the parallel form over the full prefix, in milliseconds."""
        inputs_BxL = jnp.ones((rows, context), jnp.int32)

        def turn() -> float:
            start = time.perf_counter()
            jax.block_until_ready(self._last(self._params.unstacked, inputs_BxL))
            return 1000 * (time.perf_counter() - start)

        return turn

    def _last_token(self, params, inputs_BxL):
        bound = self._params.bind(params)
        return bound.logits(bound.features(ModelInputs(inputs_BxL))[:, -1]).argmax(axis=-1)


def make_decode_turn(engine: Engine, rows: int, context: int, tokens: int) -> Callable[[], float]:
    """Returns a turn that generates the last tokens of a synthetic context, in milliseconds.

    The state of the context is made by setting its counter, since its values do not change the work.

    Args:
        engine: never ends a text.
        rows: sequences that decode at once.
        context: tokens of each, those of the turn included.
        tokens: of a turn.
    """

    def turn() -> float:
        # A new state per turn, so that two of the large states never exist at the same time.
        carry = engine.unstack(engine.start(rows, context))
        positions_B = jnp.full(rows, context - tokens, jnp.int32)
        carry = dataclasses.replace(carry, state=dataclasses.replace(carry.state, positions_B=positions_B))
        jax.block_until_ready(carry)
        start = time.perf_counter()
        carry, _ = engine.advance(carry, _GREEDY, 0, tokens)
        jax.block_until_ready(carry)
        return 1000 * (time.perf_counter() - start)

    return turn
