"""The language model on whole rows: embedding, a stack of residual sublayers, norm, logits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config import ModelConfig, without_prefix
from flash_lm.errors import InputError
from flash_lm.layers.context import Context, of_one_document, of_rows
from flash_lm.layers.dense import EMBEDDING_INITS
from flash_lm.layers.norms import NORMS
from flash_lm.layers.positions import ABSOLUTE_POSITIONS
from flash_lm.layers.table import gathered
from flash_lm.models.family import of_layers, served
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


class ParallelModel(nnx.Module):
    """A family's model of all tokens at once, for training and scoring; `LanguageModel` adds states to it."""

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
        prefix: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of all tokens at once.

        Args:
            inputs_BxL: token ids.
            segment_ids: B×L, 0 = padding, each document one contiguous run; None: one document a row.
            positions: B×L, position of each token in its document; None: counted from the document's start.
            dropout_key: key for dropout; None: deterministic.
            prefix: number of first tokens of a token's document that all of the document sees, even ahead, B×(L or 1)
                int32; None: none.

        Returns:
            B×L×V float32; with a head that describes a row by one vector, B×1×(its outputs).

        Raises:
            ValueError: rows are longer than the family's positions allow; or, outside jit, a row has several documents,
                which the family cannot separate. Inside jit its logits are NaN. Or the family has no prefixes.
        """
        features_BxLxD = self.features(inputs_BxL, segment_ids, positions, dropout_key, prefix=prefix)
        return self.logits(self.pooled(features_BxLxD, segment_ids))

    def features(
        self,
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        packed: bool = True,
        prefix: jax.Array | None = None,
    ) -> jax.Array:
        """As `__call__`, up to the last norm: B×L×D in the computation's dtype.

        `packed=False` promises that segment_ids have one document a row, with padding at its end: bidirectional linear
        attention then needs one pass over the row instead of three.
        """
        return self._features(inputs_BxL, segment_ids, positions, dropout_key, lambda x_BxLxD: (), packed, prefix)[0]

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
        prefix: jax.Array | None = None,
    ) -> tuple[jax.Array, Context]:
        """The input of the first layer, without dropout; arguments as for `features`."""
        length, separates = inputs_BxL.shape[1], "packed" in served(self.config.families)
        self.check_length(length)
        self.check_prefix(prefix)
        context = of_rows(
            length,
            segment_ids,
            positions,
            causal=self.config.causal,
            packed=packed and separates,
            prefix_BxL=prefix,
            dropout_key=dropout_key,
        )
        x_BxLxD, context = self._embed(inputs_BxL, context)
        if packed and not separates and segment_ids is not None and context.segments is not None:
            x_BxLxD = of_one_document(x_BxLxD, context.segments)
        return x_BxLxD, context

    def _features(
        self, inputs_BxL, segment_ids, positions, dropout_key, seen: Callable, packed: bool = True, prefix=None
    ):
        """The features, and the results of `watch`."""
        x_BxLxD, context = self.embed(inputs_BxL, segment_ids, positions, dropout_key, packed, prefix)
        x_BxLxD = self._dropped(x_BxLxD, dropout_key)

        def period(module: Period, x_BxLxD: jax.Array, index: jax.Array):
            return module(x_BxLxD, of_period(context, index), seen)

        embedded = seen(x_BxLxD)
        x_BxLxD, found = self._scan(period, constrain_residual(x_BxLxD), jnp.arange(self.periods))
        layers = jax.tree.map(lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:]), *found)
        x_BxLxD = self.norm(x_BxLxD)
        return x_BxLxD, {"embedding": embedded, "layers": layers, "norm": seen(x_BxLxD)}

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
        """Forward model FLOPs a token of a row of `length` tokens, logits included."""
        stack = self.periods * self.layers.flops_per_token(length, self.config.causal)
        return stack + 2 * self.config.model_dim * HEADS[self.config.head].outputs(self.config)

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


def of_period(context: Context, index: jax.Array) -> Context:
    """The context of one period, with its own dropout key."""
    key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, index)
    return dataclasses.replace(context, dropout_key=key)
