"""The language model: whole rows in training, a state in decoding, and rows that continue from a state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from ml_collections import ConfigDict

from flash_lm.config.experiment import parse_model, without_prefix
from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import HEADS
from flash_lm.errors import InputError
from flash_lm.families.encoder import encoder_of
from flash_lm.families.family import complete
from flash_lm.layers.context import Context, memory_of, rows_beyond
from flash_lm.layers.dense import EMBEDDING_INITS
from flash_lm.models.block import Block, constrain_residual, measures_of_all, penalty_of_all, restack, unstack
from flash_lm.models.decode_state import DecodeState
from flash_lm.models.encoder import Encoder
from flash_lm.models.layer_stack import LayerStack
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import Head

_OF_THE_ENCODER = 0xE7C0  # keeps the encoder's random numbers separate from those of the layers

_NO_SOURCE = "this model has an encoder, which reads a source beside the tokens: give source=…"
_NO_ENCODER = "this model has no encoder to read a source: set --config.model.encoder.family, or give no source"


class LanguageModel(LayerStack):
    """A family's language model; `flash_lm.build_model` makes one from a ConfigDict.

    A call gives the logits of whole rows. `init_state`, `prefill` and `step` decode: they give the same logits, of some
    tokens after others.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Builds the model of a complete config; the layers' parameters are stacked along a first dimension."""
        self.config = config
        init = EMBEDDING_INITS[config.init]
        shape = (config.vocab_size, config.model_dim)
        self.embedding = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self._build(rngs=rngs)
        for name, parameter in HEADS[config.head].parameters(config, rngs).items():
            setattr(self, name, parameter)
        self.encoder = Encoder(encoder_of(config), rngs=rngs) if config.encoder else None

    # Whole rows, for training and scoring.

    def __call__(
        self,
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        prefix: jax.Array | None = None,
        source: jax.Array | None = None,
        source_segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of all tokens at once.

        Args:
            inputs_BxL: token ids.
            segment_ids: B×L, 0 = padding, each document one contiguous run; None: one document a row.
            positions: B×L, position of each token in its document; None: counted from the document's start.
            dropout_key: key for dropout; None: deterministic.
            prefix: number of first tokens of a token's document that all of the document sees, even ahead, B×(L or 1)
                int32; None: none.
            source: B×M token ids, which an encoder reads and every token sees; None: the model has no encoder.
            source_segment_ids: B×M, the segment ids of the tokens that see each, 0 = padding; None: all do.

        Returns:
            B×L×V float32; with a head that describes a row by one vector, B×1×(its outputs).

        Raises:
            ValueError: rows are longer than the family's positions allow; or, outside jit, a row has several documents,
                which the family cannot separate. Inside jit its logits are NaN. Or the family has no prefixes, or
                there is a source and no encoder, or an encoder and no source.
        """
        inputs = ModelInputs(inputs_BxL, segment_ids, positions, prefix, source, source_segment_ids)
        return self.logits(self.pooled(self.features(inputs, dropout_key), segment_ids))

    def features(self, inputs: ModelInputs, dropout_key: jax.Array | None = None) -> jax.Array:
        """As a call, up to the last norm: B×L×D in the computation's dtype."""
        x_BxLxD, context = self.embed(inputs, dropout_key)
        return self._apply_layers(x_BxLxD, context)[0]

    def activations(
        self, measure: Callable[[jax.Array], Any], inputs: ModelInputs, dropout_key: jax.Array | None = None
    ) -> dict[str, Any]:
        """Applies `measure` to the activations, B×L×D, and returns the results.

        Returns:
            "embedding": of the embedded tokens; "layers": after each layer, stacked; "norm": of the features;
            "encoder": of the source's features, B×M×D, if there is an encoder.
        """
        x_BxLxD, context = self.embed(inputs, dropout_key)
        of_encoder = {} if context.memory is None else {"encoder": measure(context.memory.x_BxMxD)}
        return self._apply_layers(x_BxLxD, context, measure)[1] | of_encoder

    def embed(self, inputs: ModelInputs, dropout_key: jax.Array | None = None) -> tuple[jax.Array, Context]:
        """The input of the first layer, B×L×D, without dropout, and its context, with the encoder's features in it."""
        self.check_prefix(inputs.prefix_BxL)
        x_BxLxD, context = self._embed_rows(self.embedding[...], inputs, dropout_key)
        source_BxM, source_ids_BxM = inputs.source_BxM, inputs.source_segment_ids_BxM
        if (source_BxM is None) != (self.encoder is None):
            raise InputError(_NO_SOURCE if source_BxM is None else _NO_ENCODER)
        if source_BxM is not None:
            x_BxMxD = self.encode(source_BxM, source_ids_BxM, dropout_key, inputs.packed)
            length = inputs.tokens_BxL.shape[1]
            memory = memory_of(x_BxMxD, source_ids_BxM, inputs.segment_ids_BxL, length, packed=context.packed)
            context = dataclasses.replace(context, memory=memory)
        return x_BxLxD, context

    def encode(
        self,
        source_BxM: jax.Array,
        segment_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        packed: bool = True,
    ) -> jax.Array:
        """The features of a source, B×M×D, which cross attention reads; arguments as in `ModelInputs`."""
        if self.encoder is None:
            raise InputError(_NO_ENCODER)
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, _OF_THE_ENCODER)
        return self.encoder(self.embedding[...], ModelInputs(source_BxM, segment_ids, packed=packed), key)

    def pooled(self, features_BxLxD: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """What the head takes: the features as they are, or one vector per row, B×1×D."""
        pool = HEADS[self.config.head].pool
        if pool is None:
            return features_BxLxD
        real_BxL = jnp.ones(features_BxLxD.shape[:2], bool) if segment_ids is None else segment_ids > 0
        return pool(self.config, features_BxLxD, real_BxL)[:, None]

    def logits(self, features_BxLxD: jax.Array) -> jax.Array:
        """B×L×V float32."""
        return self.head().logits(features_BxLxD)

    def head(self) -> Head:
        """The head, which turns features into a distribution over the vocabulary."""
        return HEADS[self.config.head].bind(self)

    def penalty(self) -> jax.Array | None:
        """Sum over the layers of what their sublayers add to the loss, nats a target; None: nothing."""
        penalties = [x for stack in self._stacks() if (x := penalty_of_all(stack.layers)) is not None]
        return sum(penalties[1:], start=penalties[0]) if penalties else None

    def measures(self) -> dict[str, jax.Array]:
        """What training logs of the parameters, such as the mean span of all heads."""
        of_encoder = measures_of_all(self.encoder.layers) if self.encoder else {}
        return measures_of_all(self.layers) | {f"encoder_{name}": x for name, x in of_encoder.items()}

    def flops_per_token(self, length: int) -> float:
        """Forward model FLOPs a token of a row of `length` tokens, logits included, and those of a source as long."""
        layers = sum(x.num_blocks * x.layers.flops_per_token(length, bool(x.config.causal)) for x in self._stacks())
        return layers + 2 * self.config.model_dim * HEADS[self.config.head].outputs(self.config)

    def check_prefix(self, prefix: jax.Array | None) -> None:
        """Checks that tokens may see a prefix both ways, if there is one.

        Raises:
            InputError: the model is bidirectional, or a family's sublayers have no such form.
        """
        if prefix is None:
            return
        if not self.config.causal:
            raise InputError(
                "a prefix needs a causal model, but this one has model.causal=False, which sees all tokens"
            )
        if problems := without_prefix(self.config.families):
            raise InputError.of(problems)

    def _stacks(self) -> list[LayerStack]:
        """The model and its encoder, if there is one."""
        return [self] if self.encoder is None else [self, self.encoder]

    # Decoding: in parallel (`prefill`) and token by token (`step`).

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

        def apply(block: Block, _, index):
            return None, block.init_state(batch_size, capacity)

        _, states = self._scan(apply, None, jnp.arange(self.num_blocks))
        return DecodeState(jnp.zeros(batch_size, jnp.int32), states, capacity)

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

        def apply(block: Block, _, states):
            return None, block.remember(x_BxMxD, lengths_B, states)

        return dataclasses.replace(state, layers=self._scan(apply, None, state.layers)[1])

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

    @property
    def state_grows(self) -> bool:
        """Whether the decode state grows with the tokens that it may hold."""
        return any(sublayer.state_grows for sublayer in self.layers.sublayers)

    @property
    def settles_every(self) -> set[int]:
        """Row lengths at whose multiples a state must be settled."""
        return {n for sublayer in self.layers.sublayers if (n := sublayer.settles_every) is not None}

    # Decoding with unstacked blocks, for loops over tokens: a scan would copy each layer's slice for each token.

    def unstacked_blocks(self) -> list[Block]:
        """A separate module for each block of the layer scan; copies of their parameters, to be made before a loop."""
        return unstack(self.layers, self.num_blocks)

    def restack(self, blocks: list[Block]) -> None:
        """Replaces the layers by the modules of `unstacked_blocks`; stacks a copy of their parameters."""
        self.layers = restack(self.layers, blocks)

    def step_unstacked(
        self, tokens_B: jax.Array, state: DecodeState, blocks: list[Block]
    ) -> tuple[jax.Array, DecodeState]:
        """As `step`, for a state from `unstacked` and modules from `unstacked_blocks`.

        After a step that brings a row to a multiple of a number in `settles_every`, call `settle_unstacked`.
        """
        return self._step(tokens_B, state, _one_by_one(blocks))

    def settle_unstacked(self, state: DecodeState, blocks: list[Block]) -> DecodeState:
        """Does the work that `step_unstacked` has put off."""
        return self._settle(state, _one_by_one(blocks))

    # Training on rows that continue those of the batch before.

    def check_carried(self) -> None:
        """Checks that a state can be carried from row to row, over texts of any length.

        Raises:
            InputError: decoding is not supported, the state grows, or positions end.
        """
        self.check_decodable()
        longest, key = self._bound
        if longest is not None:
            of_family = any(sublayer.longest is not None for sublayer in self.layers.sublayers)
            other = "use another family" if of_family else "set --config.model.absolute_positions=none"
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
        x_BxLxD, context = self._embed_tokens(self.embedding[...], inputs_BxL, context)
        x_BxLxD = self._drop_embedded(x_BxLxD, dropout_key)

        def apply(block: Block, x_BxLxD: jax.Array, own: tuple[jax.Array, Any]):
            index, states = own
            return block.carry(x_BxLxD, context.fold_in(index), states)

        numbers = jnp.arange(self.num_blocks)
        x_BxLxD, states = self._scan(apply, constrain_residual(x_BxLxD), (numbers, state.layers))
        return self.norm(x_BxLxD), DecodeState(state.positions_B + lengths_B, states, state.capacity)

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

    def _step(self, tokens_B: jax.Array, state: DecodeState, scan: Callable):
        context = Context(positions_BxL=state.positions_B[:, None], lengths_B=jnp.ones_like(state.positions_B))
        features_Bx1xD, state = self._decode("step", tokens_B[:, None], context, state, scan)
        return self.logits(features_Bx1xD[:, 0]), state

    def _settle(self, state: DecodeState, scan: Callable) -> DecodeState:
        if not self.settles_every:
            return state

        def apply(block: Block, _, states):
            return None, block.settle(states, state.positions_B)

        return dataclasses.replace(state, layers=scan(apply, None, state.layers)[1])

    def _decode(self, method: str, inputs_BxL: jax.Array, context: Context, state: DecodeState, scan: Callable):
        """Features B×L×D after the last norm; NaN in rows that exceed the state or the positions.

        `scan` passes x through the blocks and their states: `_scan`, or that of `_one_by_one`.
        """
        assert context.lengths_B is not None
        end_B = state.positions_B + context.lengths_B
        grows = self.state_grows
        longest, key = self._bound
        beyond_B = rows_beyond(end_B, state.capacity if grows else longest, grows, key)
        x, context = self._embed_tokens(self.embedding[...], inputs_BxL, context)
        if method == "step":
            x = x[:, 0]

        def apply(block: Block, x, states):
            return block.decode(method, x, context, states)

        x, states = scan(apply, x, state.layers)
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


def _one_by_one(blocks: list[Block]) -> Callable:
    """Passes x through separate blocks and their states, as `LayerStack._scan` does through stacked ones."""

    def scan(apply: Callable, x: Any, states: list[Any]) -> tuple[Any, list[Any]]:
        states_after = []
        for block, state in zip(blocks, states, strict=True):
            x, state = apply(block, x, state)
            states_after.append(state)
        return x, states_after

    return scan


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
