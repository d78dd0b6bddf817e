"""The language model on whole rows: embedding, a stack of residual sublayers, norm, logits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.experiment import without_prefix
from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import HEADS
from flash_lm.errors import InputError
from flash_lm.families.encoder import encoder_of
from flash_lm.layers.context import Context, memory_of
from flash_lm.layers.dense import EMBEDDING_INITS
from flash_lm.models.heads import Head
from flash_lm.models.period import measures_of_all, penalty_of_all
from flash_lm.models.tower import Encoder, Tower

_OF_THE_ENCODER = 0xE7C0  # keeps the encoder's random numbers separate from those of the layers

_NO_SOURCE = "this model has an encoder, which reads a source beside the tokens: give source=…"
_NO_ENCODER = "this model has no encoder to read a source: set --config.model.encoder.family, or give no source"


class ParallelModel(Tower):
    """A family's model of all tokens at once, for training and scoring; `LanguageModel` adds states to it."""

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
        given = prefix, source, source_segment_ids
        features_BxLxD = self.features(inputs_BxL, segment_ids, positions, dropout_key, True, *given)
        return self.logits(self.pooled(features_BxLxD, segment_ids))

    def features(
        self,
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        packed: bool = True,
        prefix: jax.Array | None = None,
        source: jax.Array | None = None,
        source_segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """As `__call__`, up to the last norm: B×L×D in the computation's dtype.

        `packed=False` promises that segment_ids have one document a row, with padding at its end: bidirectional linear
        attention then needs one pass over the row instead of three.
        """
        given = prefix, source, source_segment_ids
        x_BxLxD, context = self.embed(inputs_BxL, segment_ids, positions, dropout_key, packed, *given)
        return self._through(x_BxLxD, context, lambda x_BxLxD: ())[0]

    def watch(
        self,
        seen: Callable[[jax.Array], Any],
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        prefix: jax.Array | None = None,
        source: jax.Array | None = None,
        source_segment_ids: jax.Array | None = None,
    ) -> dict[str, Any]:
        """Applies `seen` to the activations, B×L×D, and returns the results.

        Returns:
            "embedding": of the embedded tokens; "layers": after each layer, stacked; "norm": of the features;
            "encoder": of the source's features, B×M×D, if there is an encoder.
        """
        given = prefix, source, source_segment_ids
        x_BxLxD, context = self.embed(inputs_BxL, segment_ids, positions, dropout_key, True, *given)
        of_encoder = {} if context.memory is None else {"encoder": seen(context.memory.x_BxMxD)}
        return self._through(x_BxLxD, context, seen)[1] | of_encoder

    def embed(
        self,
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        packed: bool = True,
        prefix: jax.Array | None = None,
        source: jax.Array | None = None,
        source_segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, Context]:
        """The input of the first layer, without dropout, and its context; arguments as for `features`."""
        self.check_prefix(prefix)
        table_VxD, length = self.embedding[...], inputs_BxL.shape[1]
        x_BxLxD, context = self._input(table_VxD, inputs_BxL, segment_ids, positions, dropout_key, packed, prefix)
        if (source is None) != (self.encoder is None):
            raise InputError(_NO_SOURCE if source is None else _NO_ENCODER)
        if source is not None:
            features_BxMxD = self.encode(source, source_segment_ids, dropout_key, packed)
            memory = memory_of(features_BxMxD, source_segment_ids, segment_ids, length, packed=context.packed)
            context = dataclasses.replace(context, memory=memory)
        return x_BxLxD, context

    def encode(
        self,
        source_BxM: jax.Array,
        segment_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        packed: bool = True,
    ) -> jax.Array:
        """The features of a source, B×M×D, which cross attention reads; arguments as for `features`."""
        if self.encoder is None:
            raise InputError(_NO_ENCODER)
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, _OF_THE_ENCODER)
        return self.encoder(self.embedding[...], source_BxM, segment_ids, key, packed)

    def pooled(self, features_BxLxD: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """What the head takes: the features as they are, or one vector a row, B×1×D."""
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
        penalties = [penalty_of_all(tower.layers) for tower in (self, self.encoder) if tower is not None]
        found = [penalty for penalty in penalties if penalty is not None]
        return sum(found[1:], start=found[0]) if found else None

    def measures(self) -> dict[str, jax.Array]:
        """What training logs of the parameters, such as the mean span of all heads."""
        own = measures_of_all(self.layers)
        of_encoder = measures_of_all(self.encoder.layers) if self.encoder else {}
        return own | {f"encoder_{name}": x for name, x in of_encoder.items()}

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

    def flops_per_token(self, length: int) -> float:
        """Forward model FLOPs a token of a row of `length` tokens, logits included, and those of a source as long."""
        towers = [tower for tower in (self, self.encoder) if tower is not None]
        layers = sum(x.periods * x.layers.flops_per_token(length, bool(x.config.causal)) for x in towers)
        return layers + 2 * self.config.model_dim * HEADS[self.config.head].outputs(self.config)
