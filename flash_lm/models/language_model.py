"""The language model with states: decoding in parallel and token by token, and rows that continue from a state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from ml_collections import ConfigDict

from flash_lm.config.experiment import parse_model
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.layers.context import Context, rows_beyond
from flash_lm.models.decode_state import DecodeState
from flash_lm.models.parallel_model import ParallelModel
from flash_lm.models.period import Period, constrain_residual
from flash_lm.models.tower import of_period


class LanguageModel(ParallelModel):
    """A family's language model; `flash_lm.build_model` makes one from a ConfigDict."""

    def check_decodable(self) -> None:
        """Checks that the model supports decoding.

        Raises:
            InputError: it is bidirectional, or its normalizer or its chunks need more than a state holds.
        """
        if not self.config.causal:
            raise InputError("prefill and step need a causal model, but this one has model.causal=False")
        for sublayer in self.layers.sublayers:
            if sublayer.undecodable:
                raise InputError(sublayer.undecodable)

    def init_state(self, batch_size: int, capacity: int | None = None) -> DecodeState:
        """The decode state before the first token.

        Args:
            batch_size: B.
            capacity: largest number of tokens in a row, for states that grow. None: max_length.

        Raises:
            ValueError: the model is bidirectional, its normalizer needs the whole row, or its positions end before
                `capacity`.
        """
        self.check_decodable()
        capacity = self.config.max_length if capacity is None else capacity
        self.check_length(capacity)

        def period(module: Period, _, index):
            return None, module.init_state(batch_size, capacity)

        _, states = self._scan(period, None, jnp.arange(self.periods))
        return DecodeState(jnp.zeros(batch_size, jnp.int32), states, capacity)

    def check_carried(self) -> None:
        """Checks that a state can be carried from row to row, over texts of any length.

        Raises:
            InputError: decoding is not supported, the state grows, or positions end.
        """
        self.check_decodable()
        longest, key = self._bound
        if longest is not None:
            own = any(sublayer.longest is not None for sublayer in self.layers.sublayers)
            other = "use another family" if own else "set --config.model.absolute_positions=none"
            raise InputError(
                f"positions of family {self.config.label} end at {key}={longest}, and a text that is carried from row "
                f"to row does not: {other}"
            )
        for sublayer in self.layers.sublayers:
            if sublayer.state_grows:
                raise InputError(
                    f"the state of family {self.config.label} grows with the text: only a state of constant size can "
                    f"be carried from row to row"
                )
            if sublayer.uncarried:
                raise InputError(sublayer.uncarried)

    def carry(
        self,
        inputs_BxL: jax.Array,
        state: DecodeState,
        lengths_B: jax.Array,
        begins_B: jax.Array,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, DecodeState]:
        """The features of rows that continue from a state, as `features` and `prefill` at once, for training.

        Args:
            inputs_BxL: token ids, padded on the right.
            state: state before these tokens.
            lengths_B: tokens in each row, 0 … L.
            begins_B: which rows begin a document, and forget their state.
            dropout_key: key for dropout; None: deterministic.

        Returns:
            B×L×D, meaningless at padding; and the state after the tokens.
        """
        state = state.with_rows(begins_B, self.init_state(begins_B.size, state.capacity))
        positions_BxL = state.next_positions(inputs_BxL.shape[1])
        context = Context(positions_BxL=positions_BxL, lengths_B=lengths_B, dropout_key=dropout_key)
        x_BxLxD, context = self._embedded(self.embedding[...], inputs_BxL, context)
        x_BxLxD = self._dropped(x_BxLxD, dropout_key)

        def period(module: Period, x_BxLxD: jax.Array, each):
            index, states = each
            return module.carry(x_BxLxD, of_period(context, index), states)

        x_BxLxD, states = self._scan(period, constrain_residual(x_BxLxD), (jnp.arange(self.periods), state.layers))
        return self.norm(x_BxLxD), DecodeState(state.positions_B + lengths_B, states, state.capacity)

    def remember(self, source_BxM: jax.Array, state: DecodeState, lengths_B: jax.Array | None = None) -> DecodeState:
        """Reads a source with the encoder: the state then has its keys and values, and the tokens attend to it.

        Args:
            source_BxM: token ids, padded on the right.
            state: state from `init_state`.
            lengths_B: tokens of each source; None: all.

        Raises:
            InputError: the model has no encoder, or the source is longer than model.max_length.
        """
        self._check_source(source_BxM.shape[1])
        if lengths_B is None:
            lengths_B = jnp.full(source_BxM.shape[0], source_BxM.shape[1], jnp.int32)
        ids_BxM = (jnp.arange(source_BxM.shape[1], dtype=jnp.int32)[None] < lengths_B[:, None]).astype(jnp.int32)
        x_BxMxD = self.encode(source_BxM, ids_BxM, packed=False)

        def period(module: Period, _, states):
            return None, module.remember(x_BxMxD, lengths_B, states)

        return dataclasses.replace(state, layers=self._scan(period, None, state.layers)[1])

    def prefill(
        self,
        inputs_BxL: jax.Array,
        state: DecodeState,
        lengths_B: jax.Array | None = None,
        prefix_B: jax.Array | None = None,
    ) -> tuple[jax.Array, DecodeState]:
        """Consumes tokens in parallel, starting at any position of each row.

        Args:
            inputs_BxL: token ids, padded on the right; L may be 0.
            state: state before these tokens.
            lengths_B: tokens to consume in each row, 0 … L; None: all.
            prefix_B: number of first tokens of each row that all of it sees, even ahead; all of them must be in one
                call. None: none.

        Returns:
            B×L×V float32, meaningless at padding; and the state after the tokens.

        Raises:
            ValueError: bidirectional model, a family without prefixes, or, outside jit, a row exceeds the capacity or
                has only a part of its prefix in this call. Inside jit its logits are NaN. So are those of a row whose
                encoder has read no source, see `remember`.
        """
        if lengths_B is None:
            lengths_B = jnp.full(inputs_BxL.shape[0], inputs_BxL.shape[1], jnp.int32)
        features_BxLxD, state = self._prefill(inputs_BxL, state, lengths_B, prefix_B)
        return self.logits(features_BxLxD), state

    def prefill_last(
        self, inputs_BxL: jax.Array, state: DecodeState, lengths_B: jax.Array, prefix_B: jax.Array | None = None
    ) -> tuple[jax.Array, DecodeState]:
        """As `prefill`, with only the logits of each row's last token, B×V; meaningless if a row consumed none."""
        features_BxLxD, state = self._prefill(inputs_BxL, state, lengths_B, prefix_B)
        last_Bx1x1 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
        return self.logits(jnp.take_along_axis(features_BxLxD, last_Bx1x1, axis=1)[:, 0]), state

    def step(self, tokens_B: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
        """Consumes one token a row: B×V float32 and the state after it; raises as `prefill` does."""
        logits_BxV, state = self._step(tokens_B, state, self._scan)
        return logits_BxV, self._settle(state, self._scan)

    def step_apart(
        self, tokens_B: jax.Array, state: DecodeState, periods: list[Period]
    ) -> tuple[jax.Array, DecodeState]:
        """As `step`, for a state from `apart` and modules from `periods_apart`: for loops over tokens.

        After a step that brings a row to a multiple of a number in `settles_every`, call `settle_apart`.
        """
        return self._step(tokens_B, state, _one_by_one(periods))

    def settle_apart(self, state: DecodeState, periods: list[Period]) -> DecodeState:
        """Does the work that `step_apart` has put off."""
        return self._settle(state, _one_by_one(periods))

    @property
    def state_grows(self) -> bool:
        """Whether the decode state grows with the tokens that it may hold."""
        return any(sublayer.state_grows for sublayer in self.layers.sublayers)

    @property
    def settles_every(self) -> set[int]:
        """Row lengths at whose multiples a state must be settled."""
        return {n for sublayer in self.layers.sublayers if (n := sublayer.settles_every) is not None}

    def periods_apart(self) -> list[Period]:
        """A separate module for each layer, or for each repetition of the pattern.

        Their parameters are copies, to be made before a loop over tokens.
        """
        graph, stacked = nnx.split(self.layers)
        cut = lambda i: nnx.merge(graph, jax.tree.map(lambda x: x[i], stacked))
        return [cut(i) for i in range(self.periods)]

    def put_together(self, periods: list[Period]) -> None:
        """Replaces the layers by the modules of `periods_apart`; stacks a copy of their parameters."""
        graph, _ = nnx.split(self.layers)
        states = [nnx.split(period)[1] for period in periods]
        self.layers = nnx.merge(graph, jax.tree.map(lambda *xs: jnp.stack(xs), *states))

    def _check_source(self, length: int) -> None:
        if length > self.config.max_length:
            raise InputError(
                f"a source of {length} tokens is longer than model.max_length={self.config.max_length}: shorten it"
            )

    def _prefill(
        self, inputs_BxL: jax.Array, state: DecodeState, lengths_B: jax.Array, prefix_B: jax.Array | None
    ) -> tuple[jax.Array, DecodeState]:
        self.check_prefix(prefix_B)
        context = Context(
            positions_BxL=state.next_positions(inputs_BxL.shape[1]),
            lengths_B=lengths_B,
            prefix_BxL=None if prefix_B is None else prefix_B[:, None],
        )
        features_BxLxD, after = self._decode("prefill", inputs_BxL, context, state, self._scan)
        if prefix_B is not None:
            torn_B = _torn(prefix_B, state.positions_B, lengths_B)
            features_BxLxD = jnp.where(torn_B[:, None, None], jnp.nan, features_BxLxD)
        return features_BxLxD, after

    def _step(self, tokens_B: jax.Array, state: DecodeState, through: Callable):
        context = Context(positions_BxL=state.positions_B[:, None], lengths_B=jnp.ones_like(state.positions_B))
        features_Bx1xD, state = self._decode("step", tokens_B[:, None], context, state, through)
        return self.logits(features_Bx1xD[:, 0]), state

    def _settle(self, state: DecodeState, through: Callable) -> DecodeState:
        if not self.settles_every:
            return state

        def period(module: Period, _, states):
            return None, module.settle(states, state.positions_B)

        return dataclasses.replace(state, layers=through(period, None, state.layers)[1])

    def _decode(self, method: str, inputs_BxL: jax.Array, context: Context, state: DecodeState, through: Callable):
        """Features B×L×D after the last norm; NaN in rows that exceed the state or the positions.

        `through` passes x through the layers and their states, as `_scan` does.
        """
        assert context.lengths_B is not None
        end_B = state.positions_B + context.lengths_B
        grows = self.state_grows
        longest, key = self._bound
        beyond_B = rows_beyond(end_B, state.capacity if grows else longest, grows, key)
        x, context = self._embedded(self.embedding[...], inputs_BxL, context)
        if method == "step":
            x = x[:, 0]

        def period(module: Period, x, states):
            return module.decode(method, x, context, states)

        x, states = through(period, x, state.layers)
        features = self.norm(x if method == "prefill" else x[:, None])
        features = jnp.where(beyond_B[:, None, None], jnp.nan, features)
        return features, DecodeState(end_B, states, state.capacity)


def _torn(prefix_B: jax.Array, start_B: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Which rows have a prefix of which this call has only a part; a row without tokens here may wait.

    Raises:
        InputError: outside jit, a row has one.
    """
    inside_B = (start_B < prefix_B) & (lengths_B > 0)
    torn_B = inside_B & ((start_B > 0) | (start_B + lengths_B < prefix_B))
    if not isinstance(torn_B, Tracer) and torn_B.any():
        row = int(torn_B.argmax())
        raise InputError(
            f"row {row} has a prefix of {int(prefix_B[row])} tokens, and this call its tokens {int(start_B[row])} to "
            f"{int((start_B + lengths_B)[row])}: one call must have the whole prefix"
        )
    return torn_B


def _one_by_one(periods: list[Period]) -> Callable:
    """Passes x through separate layers and their states, as `ParallelModel._scan` does."""

    def through(layer: Callable, x: Any, states: list[Any]) -> tuple[Any, list[Any]]:
        after = []
        for module, before in zip(periods, states, strict=True):
            x, state = layer(module, x, before)
            after.append(state)
        return x, after

    return through


def build_model(config: ConfigDict, *, rngs: nnx.Rngs) -> LanguageModel:
    """Builds a model from `config.model` of any config file.

    Args:
        config: a ConfigDict with the schema of `model` in configs/base.py; if `causal` is open, it is True
            where the family has a causal form.
        rngs: random numbers for the parameters.

    Raises:
        InputError: lists every problem of the config, one a line.
    """
    return LanguageModel(complete(parse_model(config)), rngs=rngs)
