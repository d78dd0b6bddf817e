"""The language model: embedding, a stack of residual sublayers, norm, logits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from flash_lm.config import ModelConfig, parse_model
from flash_lm.errors import InputError
from flash_lm.layers.context import Context, of_one_document, of_rows, rows_beyond
from flash_lm.layers.dense import EMBEDDING_INITS
from flash_lm.layers.norms import NORMS
from flash_lm.layers.positions import ABSOLUTE_POSITIONS
from flash_lm.layers.table import gathered
from flash_lm.models.decode_state import DecodeState
from flash_lm.models.family import complete, of_layers, served
from flash_lm.models.heads import Head
from flash_lm.models.period import Period, constrain_residual, measures_of_all, penalty_of_all, stack
from flash_lm.ops.blocked_attention import KEPT
from flash_lm.ops.dropout import drop
from flash_lm.ops.positions import rotary_table
from flash_lm.tables import HEADS

_policies = jax.checkpoint_policies
REMAT_POLICIES = {
    "products": _policies.save_from_both_policies(_policies.dots_saveable, _policies.save_only_these_names(KEPT)),
    "full": _policies.nothing_saveable,
}


class LanguageModel(nnx.Module):
    """A family's language model; `flash_lm.build_model` makes one from a ConfigDict."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Builds the model of a complete config; the layers' parameters are stacked along a first dimension."""
        self.config = config
        init = EMBEDDING_INITS[config.init]
        shape = (config.vocab_size, config.model_dim)
        self.embedding = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        has_positions = config.absolute_positions != "none"
        self.positions = ABSOLUTE_POSITIONS[config.absolute_positions](config, rngs=rngs) if has_positions else None

        layers = of_layers(config)
        self.periods = config.num_layers // len(layers)
        self.layers = stack(layers, self.periods, rngs=rngs)
        self.norm = NORMS[config.norm](config)
        for name, parameter in HEADS[config.head].parameters(config, rngs).items():
            setattr(self, name, parameter)

    def __call__(
        self,
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of all tokens at once.

        Args:
            inputs_BxL: token ids.
            segment_ids: B×L, 0 = padding, each document one contiguous run; None: one document a row.
            positions: B×L, position of each token in its document; None: counted from the document's start.
            dropout_key: key for dropout; None: deterministic.

        Returns:
            B×L×V float32.

        Raises:
            ValueError: rows are longer than the family's positions allow; or, outside jit, a row has several documents,
                which the family cannot separate. Inside jit its logits are NaN.
        """
        return self.logits(self.features(inputs_BxL, segment_ids, positions, dropout_key))

    def features(
        self,
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        packed: bool = True,
    ) -> jax.Array:
        """As `__call__`, up to the last norm: B×L×D in the computation's dtype.

        `packed=False` promises that segment_ids have one document a row, with padding at its end: bidirectional linear
        attention then needs one pass over the row instead of three.
        """
        return self._features(inputs_BxL, segment_ids, positions, dropout_key, lambda x_BxLxD: (), packed)[0]

    def watch(
        self,
        seen: Callable[[jax.Array], Any],
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> dict[str, Any]:
        """Applies `seen` to the activations, B×L×D, and returns the results.

        Returns:
            "embedding": of the embedded tokens; "layers": after each layer, stacked; "norm": of the features.
        """
        return self._features(inputs_BxL, segment_ids, positions, dropout_key, seen)[1]

    def embed(
        self,
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        packed: bool = True,
    ) -> tuple[jax.Array, Context]:
        """The input of the first layer, without dropout; arguments as for `features`."""
        length, separates = inputs_BxL.shape[1], "packed" in served(self.config.families)
        self.check_length(length)
        context = of_rows(
            length,
            segment_ids,
            positions,
            causal=self.config.causal,
            packed=packed and separates,
            dropout_key=dropout_key,
        )
        x_BxLxD, context = self._embed(inputs_BxL, context)
        if packed and not separates and segment_ids is not None and context.segments is not None:
            x_BxLxD = of_one_document(x_BxLxD, context.segments)
        return x_BxLxD, context

    def _features(self, inputs_BxL, segment_ids, positions, dropout_key, seen: Callable, packed: bool = True):
        """The features, and the results of `watch`."""
        x_BxLxD, context = self.embed(inputs_BxL, segment_ids, positions, dropout_key, packed)
        x_BxLxD = self._dropped(x_BxLxD, dropout_key)

        def period(module: Period, x_BxLxD: jax.Array, index: jax.Array):
            return module(x_BxLxD, _of_period(context, index), seen)

        embedded = seen(x_BxLxD)
        x_BxLxD, found = self._scan(period, constrain_residual(x_BxLxD), jnp.arange(self.periods))
        layers = jax.tree.map(lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:]), *found)
        x_BxLxD = self.norm(x_BxLxD)
        return x_BxLxD, {"embedding": embedded, "layers": layers, "norm": seen(x_BxLxD)}

    def logits(self, features_BxLxD: jax.Array) -> jax.Array:
        """B×L×V float32."""
        return self.head().logits(features_BxLxD)

    def head(self) -> Head:
        """The head, which turns features into a distribution over the vocabulary."""
        return HEADS[self.config.head].bind(self)

    def penalty(self) -> jax.Array | None:
        """Sum over the layers of what their sublayers add to the loss, nats a target; None: nothing."""
        return penalty_of_all(self.layers)

    def measures(self) -> dict[str, jax.Array]:
        """What training logs of the parameters, such as the mean span of all heads."""
        return measures_of_all(self.layers)

    @property
    def longest(self) -> int | None:
        """Largest number of tokens in a row that the positions allow; None: any."""
        return self._bound[0]

    @property
    def _bound(self) -> tuple[int | None, str]:
        """`longest`, and the key that sets it."""
        learned = [(self.config.max_length, "model.max_length")]
        bounds = learned if self.config.absolute_positions == "learned" else []
        bounds = bounds + [(x.longest, x.longest_key) for x in self.layers.sublayers if x.longest is not None]
        return min(bounds, key=lambda bound: bound[0], default=(None, ""))

    def check_length(self, length: int) -> None:
        """Checks that the positions suffice for rows of this length.

        Raises:
            InputError: they do not.
        """
        longest, key = self._bound
        if longest is not None and length > longest:
            raise InputError(
                f"{length} tokens exceed {key}={longest}, where the positions of family {self.config.family} end: "
                f"raise --config.{key} and train again, or shorten the rows"
            )

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
        positions_BxL = state.positions_B[:, None] + jnp.arange(inputs_BxL.shape[1], dtype=jnp.int32)[None]
        context = Context(positions_BxL=positions_BxL, lengths_B=lengths_B, dropout_key=dropout_key)
        x_BxLxD, context = self._embed(inputs_BxL, context)
        x_BxLxD = self._dropped(x_BxLxD, dropout_key)

        def period(module: Period, x_BxLxD: jax.Array, each):
            index, states = each
            return module.carry(x_BxLxD, _of_period(context, index), states)

        x_BxLxD, states = self._scan(period, constrain_residual(x_BxLxD), (jnp.arange(self.periods), state.layers))
        return self.norm(x_BxLxD), DecodeState(state.positions_B + lengths_B, states, state.capacity)

    def prefill(
        self, inputs_BxL: jax.Array, state: DecodeState, lengths_B: jax.Array | None = None
    ) -> tuple[jax.Array, DecodeState]:
        """Consumes tokens in parallel, starting at any position of each row.

        Args:
            inputs_BxL: token ids, padded on the right; L may be 0.
            state: state before these tokens.
            lengths_B: tokens to consume in each row, 0 … L; None: all.

        Returns:
            B×L×V float32, meaningless at padding; and the state after the tokens.

        Raises:
            ValueError: bidirectional model, or, outside jit, a row exceeds the capacity. Inside jit its logits are NaN.
        """
        if lengths_B is None:
            lengths_B = jnp.full(inputs_BxL.shape[0], inputs_BxL.shape[1], jnp.int32)
        features_BxLxD, state = self._prefill(inputs_BxL, state, lengths_B)
        return self.logits(features_BxLxD), state

    def prefill_last(
        self, inputs_BxL: jax.Array, state: DecodeState, lengths_B: jax.Array
    ) -> tuple[jax.Array, DecodeState]:
        """As `prefill`, with only the logits of each row's last token, B×V; meaningless if a row consumed none."""
        features_BxLxD, state = self._prefill(inputs_BxL, state, lengths_B)
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

    def flops_per_token(self, length: int) -> float:
        """Forward model FLOPs a token of a row of `length` tokens, logits included."""
        stack = self.periods * self.layers.flops_per_token(length, self.config.causal)
        return stack + 2 * self.config.model_dim * HEADS[self.config.head].outputs(self.config)

    def _prefill(self, inputs_BxL: jax.Array, state: DecodeState, lengths_B: jax.Array):
        positions_BxL = state.positions_B[:, None] + jnp.arange(inputs_BxL.shape[1], dtype=jnp.int32)[None]
        return self._decode("prefill", inputs_BxL, positions_BxL, lengths_B, state, self._scan)

    def _step(self, tokens_B: jax.Array, state: DecodeState, through: Callable):
        positions_Bx1, lengths_B = state.positions_B[:, None], jnp.ones_like(state.positions_B)
        features_Bx1xD, state = self._decode("step", tokens_B[:, None], positions_Bx1, lengths_B, state, through)
        return self.logits(features_Bx1xD[:, 0]), state

    def _settle(self, state: DecodeState, through: Callable) -> DecodeState:
        if not self.settles_every:
            return state

        def period(module: Period, _, states):
            return None, module.settle(states, state.positions_B)

        return dataclasses.replace(state, layers=through(period, None, state.layers)[1])

    def _decode(self, method: str, inputs_BxL, positions_BxL, lengths_B, state: DecodeState, through: Callable):
        """Features B×L×D after the last norm; NaN in rows that exceed the state or the positions.

        `through` passes x through the layers and their states, as `_scan` does.
        """
        end_B = state.positions_B + lengths_B
        grows = any(sublayer.state_grows for sublayer in self.layers.sublayers)
        longest, key = self._bound
        beyond_B = rows_beyond(end_B, state.capacity if grows else longest, grows, key)
        context = Context(positions_BxL=positions_BxL, lengths_B=lengths_B, causal=True)
        x, context = self._embed(inputs_BxL, context)
        if method == "step":
            x = x[:, 0]

        def period(module: Period, x, states):
            return module.decode(method, x, context, states)

        x, states = through(period, x, state.layers)
        features = self.norm(x if method == "prefill" else x[:, None])
        features = jnp.where(beyond_B[:, None, None], jnp.nan, features)
        return features, DecodeState(end_B, states, state.capacity)

    def _dropped(self, x_BxLxD: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        if dropout_key is None:
            return x_BxLxD
        return drop(x_BxLxD, self.config.dropout, jax.random.fold_in(dropout_key, self.config.num_layers))

    def _embed(self, inputs_BxL: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Embeds, adds absolute positions, and makes the rotary tables once for all layers."""
        # A token outside the vocabulary gives NaN; clamping it would silently give a wrong answer.
        x_BxLxD = gathered(self.embedding[...]).at[inputs_BxL].get(mode="fill", fill_value=jnp.nan)
        if self.positions is not None:
            x_BxLxD = x_BxLxD + self.positions(context.positions_BxL)
        widths = {w for sublayer in self.layers.sublayers if (w := sublayer.rotary_width) is not None}
        tables = {
            width: rotary_table(context.positions_BxL, width, self.config.rotary_base) for width in sorted(widths)
        }
        context = dataclasses.replace(context, rotary=tables)
        return x_BxLxD.astype(jnp.dtype(self.config.dtype)), context

    def _scan(self, layer: Callable, carry: Any, per_layer: Any) -> tuple[Any, Any]:
        """Passes `carry` through the layers: layer(module, carry, per_layer[i]) -> carry, output[i]."""
        graph, stacked = nnx.split(self.layers)

        def body(carry, xs):
            parameters, each = xs
            return layer(nnx.merge(graph, parameters), carry, each)

        if self.config.remat != "none":
            # Inside a loop XLA cannot merge the recomputation with the first computation; unrolled, it would.
            policy, unrolled = REMAT_POLICIES[self.config.remat], not self.config.scan_layers
            body = jax.checkpoint(body, policy=policy, prevent_cse=unrolled)
        unroll = 1 if self.config.scan_layers else self.periods
        return jax.lax.scan(body, carry, (stacked, per_layer), unroll=unroll)


def _of_period(context: Context, index: jax.Array) -> Context:
    """The context of one period, with its own dropout key."""
    key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, index)
    return dataclasses.replace(context, dropout_key=key)


def _one_by_one(periods: list[Period]) -> Callable:
    """Passes x through separate layers and their states, as `LanguageModel._scan` does."""

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
