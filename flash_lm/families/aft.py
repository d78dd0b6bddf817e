"""Attention-free transformer (AFT) with its four forms of position bias w (Zhai et al. 2021)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import above, at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import Default, SublayerSpec, times, width_problems
from flash_lm.layers.attention import AttentionSublayer, Projected, join_heads, split_heads
from flash_lm.layers.attention_core import PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions, short_convolutions
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.positions import replicate
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.aft import aft
from flash_lm.ops.aft_bias import PairBias, PositionBias, TapBias
from flash_lm.ops.aft_decode import (
    FullState,
    WindowState,
    init_window,
    prefill_full,
    prefill_window,
)
from flash_lm.ops.rectangles import Rectangles


@section("model.aft")
class AFTOptions:
    """Options of AFT."""

    window: int = key(32, "tokens nearer than this have a position bias", at_least(0))
    bias_dim: int = key(64, "width of the factors of the position bias", at_least(1))
    bias_rate: float = key(
        3.0,
        "factor of the learning rate for these factors, since each pair of positions learns from few tokens",
        above(0),
    )


_STD_EPS = 1e-5  # for AFT-conv's filters; one with a single tap has zero deviation
_POSITION_INIT = jax.nn.initializers.normal(0.01)  # for u and v (section 4)


class AttentionFreeUnit(AttentionSublayer[jax.Array]):
    """AFT: σ(Q) ⊙ (Σ exp(K + w) ⊙ V / Σ exp(K + w)), then W_o (eq. 2); the core computes the sums."""

    def __init__(self, config: ModelConfig, core: "AFTCore", convolution: ConvolutionOptions, *, rngs: nnx.Rngs):
        """One head with a key per channel, or H heads with a key per head."""
        dim = config.model_dim
        self.core, self.rotary = core, False
        self.heads = self.key_heads = core.heads
        self.key_width, self.value_width = core.key_width, dim // core.heads
        keys = core.heads * core.key_width
        self.projection_weights = 3 * dim * dim + dim * keys
        self.query = Dense(dim, dim, config, rngs=rngs)
        self.key = Dense(dim, keys, config, rngs=rngs)
        self.value = Dense(dim, dim, config, rngs=rngs)
        self.output = Output(dim, dim, config, rngs=rngs)
        self.convolutions = short_convolutions({"key": keys, "value": dim}, config, convolution)

    core: "AFTCore"

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Keys, values, and the gate's Q."""
        return {"key": self.key(x_BxLxD), "value": self.value(x_BxLxD), "query": self.query(x_BxLxD)}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[jax.Array]:
        """Keys and values for the core, and the gate σ(Q)."""
        k, v = (split_heads(maps[name], self.heads) for name in ("key", "value"))
        return Projected(k, v, jax.nn.sigmoid(maps["query"]))

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Gates with σ(Q)."""
        assert gate_BxLxE is not None
        return self.output(gate_BxLxE * join_heads(mixed_BxHxLxE))

    def weights(self, x_BxLxD: jax.Array, context: Context) -> dict[str, jax.Array]:
        """Attention weights; with a position bias also exp(w) of the visible pairs, B×(H or 1)×L×L."""
        weights, bias = super().weights(x_BxLxD, context), self.core.bias(*[context.positions_BxL] * 2)
        # With a position bias, exp(w) is a second map: AFT's weights are exp(K) exp(w).
        if bias is not None:
            all_tokens = lambda x, axis: jnp.expand_dims(x, axis)
            w = bias.tile(Rectangles(keys=all_tokens, queries=all_tokens))[:, :, 0]
            visible_BxLxL = context.key_span().visible(jnp.arange(x_BxLxD.shape[1], dtype=jnp.int32))
            weights["exp(w)"] = jnp.where(visible_BxLxL[:, None], jnp.exp(w), 0)
        return weights


class AFTCore(PlainCore):
    """AFT-simple: no position bias w. A subclass has one, and says how far it reaches.

    Attributes:
        heads: number of heads whose channels share keys; 1: a key per channel.
        key_width: width of a head's keys.
        window: tokens nearer than this have a w; None: all.
    """

    window: int | None = 0
    width_of_w: int = 0  # inner width of the product that makes w

    def __init__(self, config: ModelConfig):
        """Creates no parameters."""
        self.heads, self.key_width = 1, config.model_dim

    @property
    def state_grows(self) -> bool:
        """Whether decoding keeps a KV cache of all tokens, because all pairs have a w."""
        return self.window is None

    def bias(self, queries_BxL: jax.Array, keys_BxM: jax.Array) -> PairBias | None:
        """The position bias w for queries and keys at these positions; None: zero."""
        return None

    def __call__(self, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×M keys, B×H×L×E values -> B×H×L×E."""
        assert context.segments is not None
        positions = context.positions_BxL
        bias = self.bias(positions, positions)
        return aft(k, v, context.segments.runs_BxL, bias, causal=context.causal, packed=context.packed)

    def init_state(
        self, batch: int, heads: int, key_width: int, value_width: int, capacity: int
    ) -> WindowState | FullState:
        """The state before the first token; `capacity` bounds the keys of AFT-full only."""
        if self.window is None:
            key, value = (jnp.zeros((batch, heads, capacity, n), jnp.float32) for n in (key_width, value_width))
            return FullState(key, value)
        return init_window(batch, heads, max(self.window - 1, 0), key_width, value_width)

    def prefill(self, k: jax.Array, v: jax.Array, context: Context, state: Any) -> tuple[jax.Array, Any]:
        """Continues each sequence from any position."""
        assert context.lengths_B is not None
        # A window needs only the last keys and values; full AFT keeps all of them.
        consume = prefill_full if self.window is None else prefill_window
        start_B = context.positions_BxL[:, 0]
        k, v32 = k.astype(jnp.float32), v.astype(jnp.float32)
        out, state = consume(k, v32, state, start_B, context.lengths_B, self.bias)
        return out.astype(v.dtype), state

    step = prefill

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """The products with exp(w) over the pairs that have one; elementwise operations are not counted."""
        if self.window == 0:
            return 0.0
        # Visible pairs, each with a numerator and a denominator, and the product for w.
        reach = length if self.window is None else min(self.window, length)
        before = reach * (reach + 1) / 2 + (length - reach) * reach  # pairs of a token with itself or an earlier one
        pairs = before if causal else 2 * before - length
        return 2 * pairs / length * heads * (key_width + value_width + self.width_of_w)


class FactorisedCore(AFTCore):
    """AFT-full and AFT-local: factorised position bias w = u_t · v_t′ with u, v ∈ R^(T×R) (section 3.1)."""

    def __init__(self, config: ModelConfig, options: AFTOptions, window: int | None, *, rngs: nnx.Rngs):
        """Initialises u and v for max_length positions."""
        super().__init__(config)
        self.window, self.longest, self.width_of_w = window, config.max_length, options.bias_dim
        shape, dtype = (config.max_length, options.bias_dim), jnp.dtype(config.param_dtype)
        draw = lambda: nnx.Param(_POSITION_INIT(rngs.params(), shape, dtype), rate=options.bias_rate, positions=True)
        self.query_position, self.key_position = draw(), draw()

    def bias(self, queries_BxL: jax.Array, keys_BxM: jax.Array) -> PositionBias | None:
        """Looks up u and v; within a document, distances of positions are distances of tokens."""
        if self.window == 0:
            return None
        # Out of range is padding, or a sequence whose logits are NaN anyway.
        u, v = (
            replicate(table[...]).astype(jnp.float32).at[positions].get(mode="clip")
            for table, positions in ((self.query_position, queries_BxL), (self.key_position, keys_BxM))
        )
        return PositionBias(queries_BxL, keys_BxM, self.window, u, v)


class ConvCore(AFTCore):
    """AFT-conv: a key and a filter per head (section 3.2); w = γ (w − mean) / std + β, γ = β = 0 at the start."""

    def __init__(self, config: ModelConfig, options: AFTOptions, *, rngs: nnx.Rngs):
        """Initialises a filter per head, with `window` taps if causal, otherwise 2·window − 1."""
        super().__init__(config)
        self.heads, self.key_width, self.window = config.num_heads, 1, options.window
        dtype = jnp.dtype(config.param_dtype)
        count = options.window if config.causal else 2 * options.window - 1
        self.taps = nnx.Param(jax.nn.initializers.normal(1.0)(rngs.params(), (self.heads, count), dtype), **VECTORS)
        self.gain = nnx.Param(jnp.zeros((self.heads, 1), dtype), **VECTORS)
        self.offset = nnx.Param(jnp.zeros((self.heads, 1), dtype), **VECTORS)

    def bias(self, queries_BxL: jax.Array, keys_BxM: jax.Array) -> TapBias:
        """The normalised filters, as a bias by distance."""
        taps, gain, offset = (p[...].astype(jnp.float32) for p in (self.taps, self.gain, self.offset))
        centred = taps - taps.mean(axis=1, keepdims=True)
        std = jnp.sqrt(jnp.square(centred).mean(axis=1, keepdims=True) + _STD_EPS)
        return TapBias(queries_BxL, keys_BxM, self.window, gain * centred / std + offset)


def _full(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(config, FactorisedCore(config, aft, None, rngs=rngs), convolution, rngs=rngs)


def _local(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(config, FactorisedCore(config, aft, aft.window, rngs=rngs), convolution, rngs=rngs)


def _simple(config: ModelConfig, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(config, AFTCore(config), convolution, rngs=rngs)


def _conv(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(config, ConvCore(config, aft, rngs=rngs), convolution, rngs=rngs)


def _filter_problems(config: ModelConfig) -> list[str]:
    problems = width_problems(config)
    if not config[AFTOptions].window:
        problems.append("model.family=aft_conv needs a filter of one tap or more: raise --config.model.aft.window")
    return problems


AFT_FULL = SublayerSpec(_full, (AFTOptions, ConvolutionOptions), unread=frozenset({"aft.window"}))
AFT_LOCAL = SublayerSpec(_local, (AFTOptions, ConvolutionOptions))
AFT_SIMPLE = SublayerSpec(_simple, (ConvolutionOptions,))
AFT_CONV = SublayerSpec(
    _conv,
    (AFTOptions, ConvolutionOptions),
    frozenset({"num_heads"}),
    unread=frozenset({"aft.bias_dim", "aft.bias_rate"}),
    problems=_filter_problems,
)
_LEARNED: dict[str, Default] = {"absolute_positions": "learned"}
_PAPER = "Zhai et al. 2021, arXiv:2105.14103"
ROWS = {
    "aft_full": Family(
        (AFT_FULL, MLP_SPEC),
        _LEARNED,
        about="attention-free transformer (AFT) with a learned bias per pair of positions",
        paper=_PAPER,
    ),
    "aft_local": Family(
        (AFT_LOCAL, MLP_SPEC), _LEARNED, about="AFT with position biases only inside a local window", paper=_PAPER
    ),
    "aft_simple": Family((AFT_SIMPLE, MLP_SPEC), _LEARNED, about="AFT without position biases", paper=_PAPER),
    # A key per head instead of per channel saves D² parameters, which the MLP gets: num_layers means the same size.
    "aft_conv": Family(
        (AFT_CONV, MLP_SPEC),
        _LEARNED | {"mlp_dim": times(9, 2)},
        about="AFT with relative position biases: one depthwise convolution per head",
        paper=_PAPER,
    ),
}
