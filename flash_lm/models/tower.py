"""A stack of layers with positions and a last norm: what a language model and an encoder have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.errors import InputError
from flash_lm.families.family import of_layers, served
from flash_lm.layers.context import Context, of_one_document, of_rows
from flash_lm.layers.norms import NORMS
from flash_lm.layers.positions import ABSOLUTE_POSITIONS
from flash_lm.layers.table import gathered
from flash_lm.models.period import Period, constrain_residual, stack
from flash_lm.ops.blocked_attention import KEPT
from flash_lm.ops.dropout import drop
from flash_lm.ops.positions import rotary_table

_policies = jax.checkpoint_policies
REMAT_POLICIES = {
    "products": _policies.save_from_both_policies(_policies.dots_saveable, _policies.save_only_these_names(KEPT)),
    "full": _policies.nothing_saveable,
}


class Tower(nnx.Module):
    """Absolute positions, layers and a norm, between an embedding and a head that are not its own."""

    config: ModelConfig

    def _build(self, *, rngs: nnx.Rngs) -> None:
        """Makes the parameters; the layers' are stacked along a first dimension."""
        config = self.config
        has_positions = config.absolute_positions != "none"
        self.positions = ABSOLUTE_POSITIONS[config.absolute_positions](config, rngs=rngs) if has_positions else None
        layers = of_layers(config)
        self.periods = config.num_layers // len(layers)
        self.layers = stack(layers, self.periods, rngs=rngs)
        self.norm = NORMS[config.norm](config)

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

    def _input(
        self,
        table_VxD: jax.Array,
        inputs_BxL: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        dropout_key: jax.Array | None,
        packed: bool,
        prefix: jax.Array | None = None,
    ) -> tuple[jax.Array, Context]:
        """The input of the first layer, without dropout, of whole rows."""
        length, separates = inputs_BxL.shape[1], "packed" in served(self.config.families)
        self.check_length(length)
        context = of_rows(
            length,
            segment_ids,
            positions,
            causal=self.config.causal,
            packed=packed and separates,
            prefix_BxL=prefix,
            dropout_key=dropout_key,
        )
        x_BxLxD, context = self._embedded(table_VxD, inputs_BxL, context)
        if packed and not separates and segment_ids is not None and context.segments is not None:
            x_BxLxD = of_one_document(x_BxLxD, context.segments)
        return x_BxLxD, context

    def _embedded(self, table_VxD: jax.Array, inputs_BxL: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Embeds, adds absolute positions, and makes the rotary tables once for all layers."""
        # A token outside the vocabulary gives NaN; clamping it would silently give a wrong answer.
        x_BxLxD = gathered(table_VxD).at[inputs_BxL].get(mode="fill", fill_value=jnp.nan)
        if self.positions is not None:
            x_BxLxD = x_BxLxD + self.positions(context.positions_BxL)
        widths = {w for sublayer in self.layers.sublayers if (w := sublayer.rotary_width) is not None}
        tables = {
            width: rotary_table(context.positions_BxL, width, self.config.rotary_base) for width in sorted(widths)
        }
        context = dataclasses.replace(context, rotary=tables)
        return x_BxLxD.astype(jnp.dtype(self.config.dtype)), context

    def _through(
        self, x_BxLxD: jax.Array, context: Context, seen: Callable[[jax.Array], Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The features, B×L×D after the last norm, and the results of `seen` on the activations.

        Returns:
            The features; and "embedding": of the input, "layers": after each layer, stacked, "norm": of the features.
        """
        x_BxLxD = self._dropped(x_BxLxD, context.dropout_key)

        def period(module: Period, x_BxLxD: jax.Array, index: jax.Array):
            return module(x_BxLxD, of_period(context, index), seen)

        embedded = seen(x_BxLxD)
        x_BxLxD, found = self._scan(period, constrain_residual(x_BxLxD), jnp.arange(self.periods))
        layers = jax.tree.map(lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:]), *found)
        x_BxLxD = self.norm(x_BxLxD)
        return x_BxLxD, {"embedding": embedded, "layers": layers, "norm": seen(x_BxLxD)}

    def _dropped(self, x_BxLxD: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        if dropout_key is None:
            return x_BxLxD
        return drop(x_BxLxD, self.config.dropout, jax.random.fold_in(dropout_key, self.config.num_layers))

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


class Encoder(Tower):
    """The layers over a model's source; it shares the model's embedding."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Builds the encoder of a config from `encoder_of`."""
        self.config = config
        self._build(rngs=rngs)

    def __call__(
        self,
        table_VxD: jax.Array,
        source_BxM: jax.Array,
        segment_ids: jax.Array | None,
        dropout_key: jax.Array | None,
        packed: bool,
    ) -> jax.Array:
        """The features of a source, B×M×D; arguments as for `LanguageModel.features`."""
        x_BxMxD, context = self._input(table_VxD, source_BxM, segment_ids, None, dropout_key, packed)
        return self._through(x_BxMxD, context, lambda x_BxMxD: ())[0]


def of_period(context: Context, index: jax.Array) -> Context:
    """The context of one period, with its own dropout key."""
    key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, index)
    return dataclasses.replace(context, dropout_key=key)
