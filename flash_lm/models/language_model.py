"""`LanguageModel`: the parallel form for training, prefill and step for decoding, and training with a carried state."""

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
from flash_lm.families.encoder import encoder_config
from flash_lm.families.family import complete
from flash_lm.layers.context import Context, make_memory, rows_beyond
from flash_lm.layers.dense import EMBEDDING_INITS
from flash_lm.models.block import Block, constrain_residual, restack, summarize_measures, total_penalty, unstack
from flash_lm.models.decode_state import DecodeState
from flash_lm.models.encoder import Encoder
from flash_lm.models.layer_stack import LayerStack
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import Head

_ENCODER_KEY = 0xE7C0  # folded into the dropout key: the encoder's random numbers differ from those of the layers

_NO_SOURCE = "this model has an encoder, which reads a source besides the tokens: give source=…"
_NO_ENCODER = "this model has no encoder to read a source: set --config.model.encoder.family, or give no source"


class LanguageModel(LayerStack):
    """A family's language model; `flash_lm.build_model` makes one from a ConfigDict.

    A call returns the logits of all tokens in parallel. `init_state`, `prefill` and `step` decode: they return the same
    logits for pieces of the sequence, one after another.

    >>> from flash_lm.configs import base
    >>> config = base.get_config().model
    >>> config.update(family="flash", vocab_size=100, num_layers=1, model_dim=32)
    >>> model = build_model(config, rngs=nnx.Rngs(0))
    >>> tokens_BxL = jnp.ones((2, 16), jnp.int32)
    >>> model(tokens_BxL).shape  # logits, B×L×V
    (2, 16, 100)
    >>> logits_BxLxV, state = model.prefill(tokens_BxL, model.init_state(2))  # decoding: a prompt in parallel
    >>> logits_BxV, state = model.step(logits_BxLxV[:, -1].argmax(-1), state)  # then one token at a time
    >>> logits_BxV.shape
    (2, 100)
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Builds the model of a complete config; the layers' parameters are stacked along a first dimension."""
        # The embedding, the stack of layers, the parameters of the head if it has any, and the encoder.
        self.config = config
        init = EMBEDDING_INITS[config.init]
        shape = (config.vocab_size, config.model_dim)
        self.embedding = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self._build(rngs=rngs)
        for name, parameter in HEADS[config.head].parameters(config, rngs).items():
            setattr(self, name, parameter)
        self.encoder = Encoder(encoder_config(config), rngs=rngs) if config.encoder else None

    # The parallel form, for training and scoring.

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
            segment_ids: B×L, 0 = padding, each document one contiguous run; None: one document per sequence.
            positions: B×L, position of each token in its document; None: counted from the document's start.
            dropout_key: key for dropout; None: deterministic.
            prefix: number of first tokens of a token's document that all of the document sees, even ahead, B×(L or 1)
                int32; None: none.
            source: B×M token ids for the encoder, whose features every token sees; None: the model has no encoder.
            source_segment_ids: B×M, for each source token the segment id of the tokens that see it, 0 = padding; None:
                all tokens see it.

        Returns:
            B×L×V float32; with a head that pools, such as that of classification, B×1×(its outputs).

        Raises:
            ValueError: sequences are longer than the family's positions allow; or, outside jit, a sequence has several
                documents, which the family cannot separate (inside jit its logits are NaN); or the family has no
                prefixes; or a source is given without an encoder, or is missing.
        """
        inputs = ModelInputs(inputs_BxL, segment_ids, positions, prefix, source, source_segment_ids)
        return self.logits(self.pool(self.features(inputs, dropout_key), segment_ids))

    def features(self, inputs: ModelInputs, dropout_key: jax.Array | None = None) -> jax.Array:
        """The output of the last norm, B×L×D in the computation's dtype; arguments as in `ModelInputs`."""
        x_BxLxD, context = self.embed(inputs, dropout_key)
        return self._apply_layers(x_BxLxD, context)[0]

    def activations(
        self, measure: Callable[[jax.Array], Any], inputs: ModelInputs, dropout_key: jax.Array | None = None
    ) -> dict[str, Any]:
        """Applies `measure` to the activations, B×L×D, and returns the results.

        Returns:
            "embedding": of the embedded tokens; "layers": after each layer, stacked; "norm": after the last norm;
            "encoder": of the source's features, B×M×D, if the model has an encoder.
        """
        x_BxLxD, context = self.embed(inputs, dropout_key)
        encoder_result = {} if context.memory is None else {"encoder": measure(context.memory.x_BxMxD)}
        return self._apply_layers(x_BxLxD, context, measure)[1] | encoder_result

    def embed(self, inputs: ModelInputs, dropout_key: jax.Array | None = None) -> tuple[jax.Array, Context]:
        """The input of the first layer, B×L×D, without dropout, and its context, with the encoder's features."""
        self.check_prefix(inputs.prefix_BxL)
        x_BxLxD, context = self._embed_rows(self.embedding[...], inputs, dropout_key)
        source_BxM, source_ids_BxM = inputs.source_BxM, inputs.source_segment_ids_BxM
        # The source goes through the encoder, and its features into the context for cross attention.
        if (source_BxM is None) != (self.encoder is None):
            raise InputError(_NO_SOURCE if source_BxM is None else _NO_ENCODER)
        if source_BxM is not None:
            x_BxMxD = self.encode(source_BxM, source_ids_BxM, dropout_key, inputs.packed)
            length = inputs.tokens_BxL.shape[1]
            memory = make_memory(x_BxMxD, source_ids_BxM, inputs.segment_ids_BxL, length, packed=context.packed)
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
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, _ENCODER_KEY)
        return self.encoder(self.embedding[...], ModelInputs(source_BxM, segment_ids, packed=packed), key)

    def pool(self, features_BxLxD: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Pools the features to one vector per sequence, B×1×D, if the head asks for it."""
        pool = HEADS[self.config.head].pool
        if pool is None:
            return features_BxLxD
        real_BxL = jnp.ones(features_BxLxD.shape[:2], bool) if segment_ids is None else segment_ids > 0
        return pool(self.config, features_BxLxD, real_BxL)[:, None]

    def logits(self, features_BxLxD: jax.Array) -> jax.Array:
        """Logits of features, B×L×V float32."""
        return self.head().logits(features_BxLxD)

    def head(self) -> Head:
        """The output head with the model's parameters."""
        return HEADS[self.config.head].bind(self)

    def penalty(self) -> jax.Array | None:
        """Sum over the layers of the penalties that their sublayers add to the loss, nats per target; None: none."""
        penalties = [x for stack in self._stacks() if (x := total_penalty(stack.layers)) is not None]
        return sum(penalties[1:], start=penalties[0]) if penalties else None

    def measures(self) -> dict[str, jax.Array]:
        """Statistics of the parameters for the training log, such as the mean span of all heads."""
        encoder_measures = summarize_measures(self.encoder.layers) if self.encoder else {}
        return summarize_measures(self.layers) | {f"encoder_{name}": x for name, x in encoder_measures.items()}

    def flops_per_token(self, length: int) -> float:
        """Forward model FLOPs per token at sequence length `length`, with the logits, and a source of equal length."""
        layers = sum(x.num_blocks * x.layers.flops_per_token(length, bool(x.config.causal)) for x in self._stacks())
        return layers + 2 * self.config.model_dim * HEADS[self.config.head].outputs(self.config)

    def check_prefix(self, prefix: jax.Array | None) -> None:
        """Checks that the model supports a bidirectional prefix, if one is given.

        Raises:
            InputError: the model is bidirectional, or a family's sublayers do not support prefixes.
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
        """The stacks of layers: the model itself, and its encoder."""
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
            capacity: largest number of tokens per sequence, for states that grow. None: max_length.

        Raises:
            ValueError: the model is bidirectional, its normalizer needs the full sequence, or its positions end before
                `capacity`.
        """
        # Every block has states of the same shapes, so the scan stacks them like the parameters.
        self.check_decodable()
        capacity = self.config.max_length if capacity is None else capacity
        self.check_length(capacity)

        def apply(block: Block, _, index):
            return None, block.init_state(batch_size, capacity)

        _, states = self._scan(apply, None, jnp.arange(self.num_blocks))
        return DecodeState(jnp.zeros(batch_size, jnp.int32), states, capacity)

    def encode_source(
        self, source_BxM: jax.Array, state: DecodeState, lengths_B: jax.Array | None = None
    ) -> DecodeState:
        """Encodes a source, and adds its keys and values for cross attention to the state.

        Args:
            source_BxM: token ids, padded on the right.
            state: state from `init_state`.
            lengths_B: number of tokens per source; None: all.

        Raises:
            InputError: the model has no encoder, or the source is longer than model.max_length.
        """
        # One forward pass of the encoder; padding has segment id 0.
        self._check_source(source_BxM.shape[1])
        if lengths_B is None:
            lengths_B = jnp.full(source_BxM.shape[0], source_BxM.shape[1], jnp.int32)
        ids_BxM = (jnp.arange(source_BxM.shape[1], dtype=jnp.int32)[None] < lengths_B[:, None]).astype(jnp.int32)
        x_BxMxD = self.encode(source_BxM, ids_BxM, packed=False)

        def apply(block: Block, _, states):
            return None, block.cache_memory(x_BxMxD, lengths_B, states)

        return dataclasses.replace(state, layers=self._scan(apply, None, state.layers)[1])

    def prefill(
        self,
        inputs_BxL: jax.Array,
        state: DecodeState,
        lengths_B: jax.Array | None = None,
        prefix_B: jax.Array | None = None,
    ) -> tuple[jax.Array, DecodeState]:
        """Consumes tokens in parallel; each sequence may be at any position.

        Args:
            inputs_BxL: token ids, padded on the right; L may be 0.
            state: state before these tokens.
            lengths_B: tokens to consume per sequence, 0 … L; None: all.
            prefix_B: number of first tokens of each sequence that all of its tokens see, even ahead; one call must
                have all of them. None: none.

        Returns:
            B×L×V float32, meaningless at padding; and the state after the tokens.

        Raises:
            ValueError: bidirectional model, a family without prefixes, or, outside jit, a sequence exceeds the
                capacity or has only a part of its prefix in this call. Inside jit its logits are NaN. They are also NaN
                if the encoder has read no source, see `encode_source`.
        """
        if lengths_B is None:
            lengths_B = jnp.full(inputs_BxL.shape[0], inputs_BxL.shape[1], jnp.int32)
        features_BxLxD, state = self._prefill(inputs_BxL, state, lengths_B, prefix_B)
        return self.logits(features_BxLxD), state

    def prefill_last(
        self, inputs_BxL: jax.Array, state: DecodeState, lengths_B: jax.Array, prefix_B: jax.Array | None = None
    ) -> tuple[jax.Array, DecodeState]:
        """`prefill` with the logits of each sequence's last token only, B×V; meaningless if it consumed none."""
        features_BxLxD, state = self._prefill(inputs_BxL, state, lengths_B, prefix_B)
        last_Bx1x1 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
        return self.logits(jnp.take_along_axis(features_BxLxD, last_Bx1x1, axis=1)[:, 0]), state

    def step(self, tokens_B: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
        """Consumes one token per sequence: B×V float32 and the state after it; raises as `prefill` does."""
        logits_BxV, state = self._step(tokens_B, state, self._scan)
        return logits_BxV, self._flush(state, self._scan)

    @property
    def state_grows(self) -> bool:
        """Whether the decode state grows with its capacity."""
        return any(sublayer.state_grows for sublayer in self.layers.sublayers)

    @property
    def flush_every(self) -> set[int]:
        """Sequence lengths at whose multiples a state must be flushed, see `Sublayer.flush`."""
        return {n for sublayer in self.layers.sublayers if (n := sublayer.flush_every) is not None}

    # Decoding with unstacked blocks, for loops over tokens: a scan would copy each layer's slice for each token.

    def unstacked_blocks(self) -> list[Block]:
        """A separate module for each block of the layer scan, with copies of its parameters, for loops over tokens."""
        return unstack(self.layers, self.num_blocks)

    def restack(self, blocks: list[Block]) -> None:
        """Replaces the layers by the modules of `unstacked_blocks`; stacks a copy of their parameters."""
        self.layers = restack(self.layers, blocks)

    def step_unstacked(
        self, tokens_B: jax.Array, state: DecodeState, blocks: list[Block]
    ) -> tuple[jax.Array, DecodeState]:
        """`step` for a state from `DecodeState.unstack` and modules from `unstacked_blocks`.

        Call `flush_unstacked` after a step that brings a sequence to a multiple of a number in `flush_every`.
        """
        return self._step(tokens_B, state, _unrolled_scan(blocks))

    def flush_unstacked(self, state: DecodeState, blocks: list[Block]) -> DecodeState:
        """Folds finished chunks into an unstacked state, which `step_unstacked` does not do."""
        return self._flush(state, _unrolled_scan(blocks))

    # Training with a carried state: the sequences of a batch continue those of the batch before.

    def check_carried(self) -> None:
        """Checks that a state can be carried from batch to batch, over documents of any length.

        Raises:
            InputError: decoding is not supported, the state grows, or positions end.
        """
        # Three obstacles: positions that end, states that grow, and what a sublayer itself declares.
        self.check_decodable()
        longest, key = self._bound
        if longest is not None:
            set_by_family = any(sublayer.longest is not None for sublayer in self.layers.sublayers)
            other = "use another family" if set_by_family else "set --config.model.absolute_positions=none"
            raise InputError(
                f"positions of family {self.config.label} end at {key}={longest}, and a text that is carried from row "
                f"to row does not: {other}"
            )
        for sublayer in self.layers.sublayers:
            if sublayer.state_grows:
                raise InputError(
                    f"the state of family {self.config.label} grows with the text: only a state of constant size can "
                    f"be carried from sequence to sequence"
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
        """The features of sequences that continue from a state: `prefill` with dropout and without logits.

        Args:
            inputs_BxL: token ids, padded on the right.
            state: state before these tokens.
            lengths_B: number of tokens per sequence, 0 … L.
            begins_B: which sequences begin a document; their state is reset.
            dropout_key: key for dropout; None: deterministic.

        Returns:
            B×L×D, meaningless at padding; and the state after the tokens.
        """
        # Where a document begins, the state is empty again.
        state = state.replace_rows(begins_B, self.init_state(begins_B.size, state.capacity))
        positions_BxL = state.next_positions(inputs_BxL.shape[1])
        context = Context(positions_BxL=positions_BxL, lengths_B=lengths_B, dropout_key=dropout_key)
        x_BxLxD, context = self._embed_tokens(self.embedding[...], inputs_BxL, context)
        x_BxLxD = self._drop_embedded(x_BxLxD, dropout_key)

        # The blocks, each with its own dropout key and state.
        def apply(block: Block, x_BxLxD: jax.Array, per_block: tuple[jax.Array, Any]):
            index, states = per_block
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
            split_B = _has_split_prefix(prefix_B, state.positions_B, lengths_B)
            features_BxLxD = jnp.where(split_B[:, None, None], jnp.nan, features_BxLxD)
        return features_BxLxD, after

    def _step(self, tokens_B: jax.Array, state: DecodeState, scan: Callable):
        context = Context(positions_BxL=state.positions_B[:, None], lengths_B=jnp.ones_like(state.positions_B))
        features_Bx1xD, state = self._decode("step", tokens_B[:, None], context, state, scan)
        return self.logits(features_Bx1xD[:, 0]), state

    def _flush(self, state: DecodeState, scan: Callable) -> DecodeState:
        if not self.flush_every:
            return state

        def apply(block: Block, _, states):
            return None, block.flush(states, state.positions_B)

        return dataclasses.replace(state, layers=scan(apply, None, state.layers)[1])

    def _decode(self, method: str, inputs_BxL: jax.Array, context: Context, state: DecodeState, scan: Callable):
        """Features B×L×D after the last norm; NaN in sequences that exceed the state or the positions.

        `scan` passes x through the blocks and their states: `_scan`, or the result of `_unrolled_scan`.
        """
        # Which sequences end beyond the capacity or the positions.
        assert context.lengths_B is not None
        end_B = state.positions_B + context.lengths_B
        grows = self.state_grows
        longest, key = self._bound
        beyond_B = rows_beyond(end_B, state.capacity if grows else longest, grows, key)

        # Embedding, blocks, last norm; a step has no axis for the length.
        x, context = self._embed_tokens(self.embedding[...], inputs_BxL, context)
        if method == "step":
            x = x[:, 0]

        def apply(block: Block, x, states):
            return block.decode(method, x, context, states)

        x, states = scan(apply, x, state.layers)
        features = self.norm(x if method == "prefill" else x[:, None])
        features = jnp.where(beyond_B[:, None, None], jnp.nan, features)
        return features, DecodeState(end_B, states, state.capacity)


def _has_split_prefix(prefix_B: jax.Array, start_B: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Which sequences have only a part of their prefix in this call, B; a sequence may also have none of it yet.

    Raises:
        InputError: outside jit, a sequence has a part of its prefix.
    """
    inside_B = (start_B < prefix_B) & (lengths_B > 0)
    split_B = inside_B & ((start_B > 0) | (start_B + lengths_B < prefix_B))
    if not isinstance(split_B, Tracer) and split_B.any():
        row = int(split_B.argmax())
        raise InputError(
            f"row {row} has a prefix of {int(prefix_B[row])} tokens, and this call its tokens {int(start_B[row])} to "
            f"{int((start_B + lengths_B)[row])}: one call must have the complete prefix"
        )
    return split_B


def _unrolled_scan(blocks: list[Block]) -> Callable:
    """A loop with the interface of `LayerStack._scan` over separate blocks and their states."""

    def scan(apply: Callable, x: Any, states: list[Any]) -> tuple[Any, list[Any]]:
        states_after = []
        for block, state in zip(blocks, states, strict=True):
            x, state = apply(block, x, state)
            states_after.append(state)
        return x, states_after

    return scan


def build_model(config: ConfigDict, *, rngs: nnx.Rngs) -> LanguageModel:
    """Builds a model from `config.model` of any config file; `LanguageModel` has an example.

    Args:
        config: a ConfigDict with the schema of `model` in configs/base.py; if `causal` is open, it is True if the
            family has a causal form.
        rngs: random numbers for the parameters.

    Raises:
        InputError: lists every problem of the config, one per line.
    """
    return LanguageModel(complete(parse_model(config)), rngs=rngs)
