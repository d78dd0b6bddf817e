"""`LayerStack`: absolute positions, a scan over the layers and a last norm; the base of model and encoder."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.errors import InputError
from flash_lm.families.family import common_forms, layer_configs
from flash_lm.layers.context import Context, make_context, require_one_document
from flash_lm.layers.norms import NORMS
from flash_lm.layers.positions import ABSOLUTE_POSITIONS
from flash_lm.models.block import Block, constrain_residual, stack
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.ops.blocked_attention import KEPT
from flash_lm.ops.dropout import drop
from flash_lm.ops.embedding import embed_tokens
from flash_lm.ops.fused_attention import is_cudnn
from flash_lm.ops.positions import rotary_table
from flash_lm.ops.target import target_platform

_MOST_UNROLLED = 32  # more layers would take minutes to compile
_policies = jax.checkpoint_policies
REMAT_POLICIES = {
    "products": _policies.save_from_both_policies(
        _policies.dots_saveable,
        _policies.save_from_both_policies(_policies.save_only_these_names(KEPT), is_cudnn),
    ),
    "full": _policies.nothing_saveable,
}


class LayerStack(nnx.Module):
    """Absolute positions, layers and a last norm; embedding and head belong to the subclass or the caller."""

    config: ModelConfig

    def _build(self, *, rngs: nnx.Rngs) -> None:
        """Initialises the parameters; those of the layers are stacked along a first dimension."""
        # Positions, blocks and norm, in this order: the random numbers of a seed depend on it.
        config = self.config
        has_positions = config.absolute_positions != "none"
        self.positions = ABSOLUTE_POSITIONS[config.absolute_positions](config, rngs=rngs) if has_positions else None
        layers = layer_configs(config)
        self.num_blocks = config.num_layers // len(layers)
        self.layers = stack(layers, self.num_blocks, rngs=rngs)
        self.norm = NORMS[config.norm](config)

    @property
    def longest(self) -> int | None:
        """Largest sequence length that the positions allow; None: any."""
        return self._bound[0]

    @property
    def _bound(self) -> tuple[int | None, str]:
        """`longest`, and the key that sets it."""
        # Learned positions of the model, and the bounds of the sublayers, such as AFT's position biases.
        learned = [(self.config.max_length, "model.max_length")]
        bounds = learned if self.config.absolute_positions == "learned" else []
        bounds = bounds + [(x.longest, x.longest_key) for x in self.layers.sublayers if x.longest is not None]
        return min(bounds, key=lambda bound: bound[0], default=(None, ""))

    def check_length(self, length: int) -> None:
        """Checks that the positions suffice for this sequence length.

        Raises:
            InputError: they do not.
        """
        longest, key = self._bound
        if longest is not None and length > longest:
            raise InputError(
                f"{length} tokens exceed {key}={longest}, where the positions of family {self.config.family} end: "
                f"raise --config.{key} and train again, or shorten the sequences"
            )

    def _embed_rows(
        self, table_VxD: jax.Array, inputs: ModelInputs, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Context]:
        """The input of the first layer, without dropout, for the parallel form, and its context without a source."""
        # The context: positions, documents and the prefix.
        length, separates = inputs.tokens_BxL.shape[1], "packed" in common_forms(self.config.families)
        self.check_length(length)
        context = make_context(
            length,
            inputs.segment_ids_BxL,
            inputs.positions_BxL,
            causal=self.config.causal,
            packed=inputs.packed and separates,
            prefix_BxL=inputs.prefix_BxL,
            dropout_key=dropout_key,
        )
        x_BxLxD, context = self._embed_tokens(table_VxD, inputs.tokens_BxL, context)
        # A family that cannot separate documents takes one per sequence, which costs a check if there may be more.
        if inputs.packed and not separates and inputs.segment_ids_BxL is not None and context.segments is not None:
            x_BxLxD = require_one_document(x_BxLxD, context.segments)
        return x_BxLxD, context

    def _embed_tokens(self, table_VxD: jax.Array, tokens_BxL: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Embeds tokens, adds absolute positions, and computes the rotary tables once for all layers."""
        x_BxLxD: Any = embed_tokens(table_VxD, tokens_BxL, self.config.dtype)
        if self.positions is not None:
            x_BxLxD = self.positions(x_BxLxD.astype(jnp.float32), context.positions_BxL)
        # One table per width of queries and keys: patterns may mix families.
        widths = {w for sublayer in self.layers.sublayers if (w := sublayer.rotary_width) is not None}
        tables = {
            width: rotary_table(context.positions_BxL, width, self.config.rotary_base) for width in sorted(widths)
        }
        context = dataclasses.replace(context, rotary=tables)
        return x_BxLxD.astype(jnp.dtype(self.config.dtype)), context

    def _drop_embedded(self, x_BxLxD: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        """Applies dropout to the input of the first layer."""
        if dropout_key is None:
            return x_BxLxD
        # The blocks fold in smaller numbers, so the key is different.
        return drop(x_BxLxD, self.config.dropout, jax.random.fold_in(dropout_key, self.config.num_layers))

    def _apply_layers(
        self, x_BxLxD: jax.Array, context: Context, measure: Callable[[jax.Array], Any] = lambda x_BxLxD: ()
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Applies the layers and the last norm.

        Returns:
            The features, B×L×D; and the results of `measure`, "embedding": on the input, "layers": after each layer,
            stacked, "norm": on the features.
        """
        x_BxLxD = self._drop_embedded(x_BxLxD, context.dropout_key)
        embedded = measure(x_BxLxD)

        def apply(block: Block, x_BxLxD: jax.Array, index: jax.Array):
            return block(x_BxLxD, context.fold_in(index), measure)

        x_BxLxD, measured = self._scan(apply, constrain_residual(x_BxLxD), jnp.arange(self.num_blocks))
        # The scan stacks over the blocks, and a block has a list over its layers: into one axis, in order.
        layers = jax.tree.map(lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:]), *measured)
        x_BxLxD = self.norm(x_BxLxD)
        return x_BxLxD, {"embedding": embedded, "layers": layers, "norm": measure(x_BxLxD)}

    def _scan(self, apply: Callable, carry: Any, per_block: Any) -> tuple[Any, Any]:
        """Passes `carry` through the blocks: carry, output[i] = apply(block[i], carry, per_block[i])."""
        # lax.scan needs arrays: the body builds the block from the shared graph and its slice of the parameters.
        graph, stacked = nnx.split(self.layers)

        def body(carry, xs):
            parameters, block_input = xs
            return apply(nnx.merge(graph, parameters), carry, block_input)

        if self.config.remat != "none":
            # Inside a loop XLA cannot merge the recomputation with the first computation; unrolled, it would.
            policy = REMAT_POLICIES[self.config.remat]
            body = jax.checkpoint(body, policy=policy, prevent_cse=not self._is_scanned())
        unroll = 1 if self._is_scanned() else self.num_blocks
        return jax.lax.scan(body, carry, (stacked, per_block), unroll=unroll)

    def _is_scanned(self) -> bool:
        """Whether the layers are one compiled layer: `model.scan_layers`, or what suits the device if it is open."""
        if self.config.scan_layers is not None:
            return self.config.scan_layers
        # A GPU's libraries for products cannot write into what a scan keeps for its derivative, nor read from it, so
        # all of it is copied, a third of a step's bytes. A TPU's products can.
        return target_platform() != "gpu" or self.config.num_layers > _MOST_UNROLLED
