"""Attention sublayers: projections around an attention core; multi-head and grouped-query attention (MHA, GQA)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.layers.attention_core import Core, CoreOfPairs, Pair, Pairs
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions, ShortConvolutions, short_convolutions
from flash_lm.layers.dense import QUERY_KEY_VALUE, Dense, Output
from flash_lm.layers.norms import RMSNorm, normal_heads
from flash_lm.layers.scale_offsets import ScaleOffsets, unit_scales
from flash_lm.layers.sublayer import State, Sublayer
from flash_lm.ops.activations import gated
from flash_lm.ops.positions import rotate

Mixed = TypeVar("Mixed")  # the inputs of a core besides the values


class Projected(NamedTuple, Generic[Mixed]):
    """The inputs of an attention core, and the gate of its output.

    Attributes:
        by: pairs of queries and keys, or keys only, from which the core computes the weights of the values.
        v_BxHxLxE: the values.
        gate: what `finish` needs besides the mixed values, such as their factor, B×L×E; None: nothing.
    """

    by: Mixed
    v_BxHxLxE: jax.Array
    gate: Any = None


class ConvolvedState(NamedTuple):
    """Decode state with short convolutions: the state of the core, and the last inputs of each convolution."""

    core: State
    last: Mapping[str, jax.Array]


class AttentionSublayer(Sublayer, Generic[Mixed]):
    """An attention sublayer: input projections, attention core, output projection. Subclasses define the projections.

    With model.short_convolution, convolutions follow the input projections.
    """

    core: Core[Mixed]
    heads: int
    key_heads: int  # heads of keys and values; each is shared by `heads` / `key_heads` heads of queries
    key_width: int
    value_width: int
    projection_weights: int  # number of weights in all linear maps
    rotary: bool  # whether queries and keys are rotated
    convolutions: ShortConvolutions | None = None  # of model.short_convolution

    @property
    def state_grows(self) -> bool:  # type: ignore[override]
        """The same as for the core."""
        return self.core.state_grows

    @property
    def longest(self) -> int | None:  # type: ignore[override]
        """Longest sequence that the core supports."""
        return self.core.longest

    @property
    def longest_key(self) -> str:  # type: ignore[override]
        """The same as for the core."""
        return self.core.longest_key

    @property
    def undecodable(self) -> str | None:  # type: ignore[override]
        """The same as for the core."""
        return self.core.undecodable

    @property
    def uncarried(self) -> str | None:  # type: ignore[override]
        """The same as for the core."""
        return self.core.uncarried

    @property
    def flush_every(self) -> int | None:  # type: ignore[override]
        """The same as for the core."""
        return self.core.flush_every

    def flush(self, state: State, positions_B: jax.Array) -> State:
        """Folds finished chunks into the state of the core."""
        if self.convolutions is None:
            return self.core.flush(state, positions_B)
        return ConvolvedState(self.core.flush(state.core, positions_B), state.last)

    @property
    def rotary_width(self) -> int | None:  # type: ignore[override]
        """Width of the queries and keys."""
        return self.key_width if self.rotary else None

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """The input projections by name, B×L×… each; short convolutions have the same names."""
        raise TypeError(f"{type(self).__name__} must define maps")

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[Mixed]:
        """The inputs of the core and the gate, from the input projections."""
        raise TypeError(f"{type(self).__name__} must define arrange")

    def project(self, x_BxLxD: jax.Array, context: Context) -> Projected[Mixed]:
        """The inputs of the core, and the gate."""
        maps = self.maps(x_BxLxD)
        return self.arrange(self.convolutions(maps, context) if self.convolutions else maps, context)

    def finish(self, mixed_BxHxLxE: jax.Array, gate: Any, /) -> jax.Array:
        """Output projection: from the output of the core to B×L×D."""
        raise TypeError(f"{type(self).__name__} must define finish")

    def rotate_pairs(self, pairs: Pairs, context: Context) -> Pairs:
        """The pairs with rotary positions, if the sublayer has them."""
        if self.rotary_width is None:
            return pairs
        # All pairs of a sublayer have the same width, so they share a table.
        table = context.rotary[self.rotary_width]
        return {name: Pair(*(rotate(x, table) for x in pair)) for name, pair in pairs.items()}

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """B×L×D."""
        # Input projections, token mixing, output projection.
        by, v, gate = self.project(x_BxLxD, context)
        return self.finish(self.core(by, v, context), gate)

    def weights(self, x_BxLxD: jax.Array, context: Context) -> dict[str, jax.Array]:
        """The attention matrix, B×H×L×L, by term of the core: the weight of each value in each output.

        Every core is linear in the values, so column j is the output for values of one at token j and zero elsewhere.
        If a weight differs by channel, this is the mean. The cost is that of L calls, so use small inputs.
        """
        by, v, _ = self.project(x_BxLxD, context)

        # Column j of the attention matrix is the output for a one-hot value at token j.
        def column(token: jax.Array) -> dict[str, jax.Array]:
            unit = jnp.zeros_like(v).at[:, :, token].set(1)
            return jax.tree.map(lambda out: out.astype(jnp.float32).mean(axis=-1), self.core.terms(by, unit, context))

        stacked = jax.lax.map(column, jnp.arange(v.shape[2]))
        return jax.tree.map(lambda of_all: jnp.moveaxis(of_all, 0, -1), stacked)

    def init_state(self, batch_size: int, capacity: int) -> State:
        """The state of the core; with short convolutions also their last inputs."""
        core = self.core.init_state(batch_size, self.key_heads, self.key_width, self.value_width, capacity)
        return ConvolvedState(core, self.convolutions.init_state(batch_size)) if self.convolutions else core

    def prefill(self, x_BxLxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        """Any number of tokens per sequence, including none."""
        if x_BxLxD.shape[1] == 0:
            return x_BxLxD, state
        return self._decode(self.core.prefill, x_BxLxD, context, state)

    def step(self, x_BxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        """One token per sequence."""
        y_Bx1xD, state = self._decode(self.core.step, x_BxD[:, None], context, state)
        return y_Bx1xD[:, 0], state

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Input and output projections, convolutions and core."""
        core = self.core.flops_per_token(length, causal, self.heads, self.key_width, self.value_width)
        convolutions = self.convolutions.flops_per_token(length, causal) if self.convolutions else 0
        return 2 * self.projection_weights + convolutions + core

    def _decode(self, mix: Callable, x_BxLxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        # The convolutions keep their last inputs; the core has a separate state.
        maps, core_state, last = self.maps(x_BxLxD), state, {}
        if self.convolutions is not None:
            maps, last = self.convolutions.prefill(maps, context, state.last)
            core_state = state.core
        by, v, gate = self.arrange(maps, context)
        mixed_BxHxLxE, core_state = mix(by, v, context, core_state)
        return self.finish(mixed_BxHxLxE, gate), ConvolvedState(core_state, last) if self.convolutions else core_state


class MultiHeadAttention(AttentionSublayer[Pairs]):
    """Multi-head attention: softmax(q kᵀ / √K) v in H heads, then W_o ("Attention Is All You Need", section 3.2.2).

    Several heads of queries may share a head of keys and values ("GQA", Ainslie et al. 2023, section 2.2), which the KV
    cache then holds once. If a core needs several pairs, each is a scale-offset of the heads' queries and keys, so the
    size stays that of the Transformer (MC-TFM). QK-norm: an RMS norm of queries and keys keeps scores from growing
    ("Scaling Vision Transformers to 22 Billion Parameters", Dehghani et al. 2023, section 2, with a layer norm).
    """

    def __init__(
        self,
        config: ModelConfig,
        core: CoreOfPairs,
        convolution: ConvolutionOptions | None = None,
        *,
        rngs: nnx.Rngs,
        key_heads: int | None = None,
        key_width: int | None = None,
        scale_offsets: bool = False,
        zero_queries: Collection[str] = (),
    ):
        """H heads of width K, `key_width` for queries and keys; the core must support fewer heads of keys.

        With `scale_offsets` each pair of the core has scale-offsets of the queries and keys; those of the queries of
        the pairs `zero_queries` start at 0.
        """
        dim, joined = config.model_dim, config.num_heads * config.head_width
        self.core, self.rotary, self.pair_names = core, bool(config.rotary), tuple(core.pair_scaling)
        self.heads, self.key_heads = config.num_heads, key_heads or config.num_heads
        self.value_width = config.head_width
        self.key_width = key_width or self.value_width
        # Grouped-query attention: keys and values may have fewer heads than the queries.
        widths = {
            "query": self.heads * self.key_width,
            "key": self.key_heads * self.key_width,
            "value": self.key_heads * self.value_width,
        }
        self.projection_weights = dim * (joined + sum(widths.values()))
        dense = lambda width: Dense(dim, width, config, rngs=rngs, biased=QUERY_KEY_VALUE)
        self.query, self.key, self.value = (dense(width) for width in widths.values())
        self.output = Output(joined, dim, config, rngs=rngs)
        self.convolutions = short_convolutions(widths, config, convolution)
        width = (self.heads, self.key_width)

        def variants(zero: Collection[str]) -> ScaleOffsets | None:
            # Queries and keys are already projections, so they do not start small as in a GAU, whatever the init.
            return ScaleOffsets(unit_scales(core.pair_scaling, width, config, zero)) if scale_offsets else None

        # MC-TFM: pairs for local and global attention from the same queries and keys.
        self.query_variants, self.key_variants = variants(zero_queries), variants(())
        self.query_norm, self.key_norm = query_key_norms(config, self.key_width)

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Queries, keys and values."""
        return {"query": self.query(x_BxLxD), "key": self.key(x_BxLxD), "value": self.value(x_BxLxD)}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[Pairs]:
        """Heads of queries, keys and values."""
        # Heads, then QK-norm, then the variants of MC-TFM, then rotary positions.
        q = split_heads(maps["query"], self.heads)
        k, v = (split_heads(maps[name], self.key_heads) for name in ("key", "value"))
        q, k = apply_qk_norm(q, self.query_norm), apply_qk_norm(k, self.key_norm)
        queries = self.query_variants(q) if self.query_variants else [q]
        keys = self.key_variants(k) if self.key_variants else [k]
        return Projected(self.rotate_pairs(named_pairs(self.pair_names, queries, keys), context), v)

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))


def norm_and_gate(mixed_BxHxLxE: jax.Array, gain_E: nnx.Param | None, gate_BxLxE: jax.Array | None) -> jax.Array:
    """The heads' outputs joined, each normalised and then gated: norm(o) ⊙ silu(gate), B×L×(H·E); None: left out."""
    heads = mixed_BxHxLxE if gain_E is None else normal_heads(mixed_BxHxLxE, gain_E[...])
    return join_heads(heads) if gate_BxLxE is None else gated(gate_BxLxE, join_heads(heads))


def query_key_norms(config: ModelConfig, width: int) -> tuple[RMSNorm | None, RMSNorm | None]:
    """QK-norm: RMS norms of the queries and keys of a head, with model.query_key_norm."""
    norm = lambda: RMSNorm(config, width) if config.query_key_norm else None
    return norm(), norm()


def apply_qk_norm(x_BxHxLxK: jax.Array, norm: RMSNorm | None) -> jax.Array:
    """Queries or keys after QK-norm, if the model has it."""
    return x_BxHxLxK if norm is None else norm(x_BxHxLxK)


def named_pairs(names: Sequence[str], queries: Sequence[jax.Array], keys: Sequence[jax.Array]) -> Pairs:
    """Queries and keys by the names of a core's pairs."""
    return {name: Pair(q, k) for name, q, k in zip(names, queries, keys, strict=True)}


def split_heads(x_BxLxD: jax.Array, heads: int) -> jax.Array:
    """B×L×(H·K) -> B×H×L×K."""
    x_BxLxHxK = x_BxLxD.reshape(*x_BxLxD.shape[:2], heads, -1)
    return jnp.swapaxes(x_BxLxHxK, 1, 2)


def join_heads(mixed_BxHxLxE: jax.Array) -> jax.Array:
    """B×H×L×E -> B×L×(H·E)."""
    mixed_BxLxHxE = jnp.swapaxes(mixed_BxHxLxE, 1, 2)
    return mixed_BxLxHxE.reshape(*mixed_BxLxHxE.shape[:2], -1)
