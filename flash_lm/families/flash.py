"""FLASH: gated attention units (GAU), quadratic or with mixed chunk attention, and MC-TFM (Hua et al. 2022)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import GLU_SPEC
from flash_lm.families.sublayer_spec import (
    EVERYTHING,
    GATED_UNIT_KEYS,
    MULTI_HEAD_KEYS,
    Default,
    SublayerSpec,
    divisor_problems,
    head_problems,
    times,
)
from flash_lm.layers.attention import (
    AttentionSublayer,
    MultiHeadAttention,
    Projected,
    join_heads,
    named_pairs,
    split_heads,
)
from flash_lm.layers.attention_core import CoreOfPairs, Pairs
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions, short_convolutions
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.mixed_chunk_core import ChunkOptions, MixedChunkCore
from flash_lm.layers.positions import relative_bias
from flash_lm.layers.quadratic_core import QuadraticCore, QuadraticOptions
from flash_lm.layers.scale_offsets import ScaleOffsets, first_scales
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.activations import gated, silu


@section("model.gau")
class GAUOptions:
    """Options of a gated attention unit (GAU)."""

    expanded_dim: int = key(None, "E; open: 2 D", at_least(1))
    shared_dim: int = key(64, "S, width of the queries and keys", at_least(1))
    heads: int = key(1, "heads, which share Z and split E", at_least(1))
    query_key: str = key(
        "scale_offset",
        "scale_offset (queries and keys from one Z) or dense (a Z for each)",
        one_of("scale_offset", "dense"),
    )
    relative_bias: str = key(
        None,
        "none, t5, toeplitz or rope (products of two learned vectors with rotary positions); open: from the family",
        one_of("none", "t5", "toeplitz", "rope"),
    )
    attention_function: str = key("relu2", "relu2, softmax or laplace", one_of("relu2", "softmax", "laplace"))


class GatedAttentionUnit(AttentionSublayer[Pairs]):
    """Gated attention unit (GAU): (U ⊙ A V) W_o with U = silu(x W_u), V = silu(x W_v) (eq. 3–5).

    Queries and keys are scale-offsets γ ⊙ Z + β of one Z = silu(x W_z). The paper's unit has one head. With several
    heads, V is split among them, and there are scale-offsets per head. With `query_key=dense` there is a
    Z_i = silu(x W_i) per query and key. Convolutions come before the silu of V and of Z, as in Mamba-2.
    """

    def __init__(self, config: ModelConfig, options: GAUOptions, core: CoreOfPairs, *, rngs: nnx.Rngs):
        """Expanded width E, shared width S, H heads."""
        dim, expanded, shared = config.model_dim, options.expanded_dim, options.shared_dim
        self.core, self.rotary, self.pair_names = core, bool(config.rotary), tuple(core.pair_scaling)
        self.heads = self.key_heads = options.heads
        self.key_width, self.value_width = shared, expanded // self.heads
        self.copies = 2 * len(core.pair_scaling)
        dense = options.query_key == "dense"
        z_width = self.copies * self.heads * shared if dense else shared  # dense: all queries and keys side by side
        self.projection_weights = 3 * dim * expanded + dim * z_width
        self.gate = Dense(dim, expanded, config, rngs=rngs)
        self.value = Dense(dim, expanded, config, rngs=rngs)
        self.shared = Dense(dim, z_width, config, rngs=rngs)
        self.output = Output(expanded, dim, config, rngs=rngs)
        # One scale and offset per variant: γ and β have no head dimension with a single head.
        width = (shared,) if self.heads == 1 else (self.heads, shared)
        scales = first_scales(core.pair_scaling, width, config, of_one_source=not dense, rngs=rngs)
        self.dense, self.variants = dense, ScaleOffsets(scales)
        self.convolutions = short_convolutions({"value": expanded, "shared": z_width}, config)

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """U, V and Z, before their silu."""
        return {"gate": self.gate(x_BxLxD), "value": self.value(x_BxLxD), "shared": self.shared(x_BxLxD)}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[Pairs]:
        """Queries and keys are scale-offsets of the same Z, or of a Z each."""
        gate, v, z = (maps[name] for name in ("gate", "value", "shared"))
        # A Z per query and key with query_key=dense, else one Z for all.
        zs = jnp.split(split_heads(silu(z), self.heads), self.copies, axis=-1) if self.dense else silu(z)[:, None]
        variants = self.variants(zs)
        pairs = named_pairs(self.pair_names, variants[::2], variants[1::2])
        return Projected(self.rotate_pairs(pairs, context), split_heads(silu(v), self.heads), gate)

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Gates with U."""
        return self.output(gated(gate_BxLxE, join_heads(mixed_BxHxLxE)))


def _quadratic_unit(config: ModelConfig, gau: GAUOptions, quadratic: QuadraticOptions, *, rngs: nnx.Rngs) -> Sublayer:
    bias = relative_bias(gau.relative_bias, gau.shared_dim, config, rngs=rngs)
    core = QuadraticCore(config, quadratic, gau.attention_function, bias)
    return GatedAttentionUnit(config, gau, core, rngs=rngs)


def _mixed_chunk_unit(config: ModelConfig, gau: GAUOptions, chunks: ChunkOptions, *, rngs: nnx.Rngs) -> Sublayer:
    bias = relative_bias(gau.relative_bias, gau.shared_dim, config, rngs=rngs)
    core = MixedChunkCore(config, chunks, gau.attention_function, bias)
    return GatedAttentionUnit(config, gau, core, rngs=rngs)


def _mixed_chunk_heads(
    config: ModelConfig,
    chunks: ChunkOptions,
    quadratic: QuadraticOptions,
    convolution: ConvolutionOptions,
    *,
    rngs: nnx.Rngs,
) -> Sublayer:
    core = MixedChunkCore(config, chunks, implementation=quadratic.implementation)
    # Keys start as usual, so that the gradient of the queries' γ is not zero, too.
    zero_queries = ("global",) if chunks.zero_global else ()
    return MultiHeadAttention(config, core, convolution, rngs=rngs, scale_offsets=True, zero_queries=zero_queries)


# Attention functions whose output is near 0 while the scores are near 0, as at initialisation, by `model.divides`.
# Softmax does not qualify: its weights sum to 1. Nor does Laplace where N divides scores: f(0) = 0.006 per key adds up.
# Scores of dense queries and keys are small only if N divides them.
_ZERO_AT_INIT: Mapping[str, Callable[[GAUOptions], bool]] = {
    "weights": lambda gau: gau.attention_function != "softmax" and gau.query_key != "dense",
    "scores": lambda gau: gau.attention_function == "relu2",
}


def _residual_init(config: ModelConfig) -> str:
    """`as_init` for units that add almost nothing at initialisation: small maps, or scores near 0 (`_ZERO_AT_INIT`).

    With an encoder always `depth`: cross attention adds much from the start.
    """
    low = config.scale_init == "normal" and _ZERO_AT_INIT[str(config.divides)](config[GAUOptions])
    small = config.encoder is None and (config.init == "normal" or low)
    return "as_init" if small else "depth"


def _problems(config: ModelConfig) -> list[str]:
    problems, gau = [], config[GAUOptions]
    # Values split into heads, and rotary positions pair the dimensions of queries and keys.
    if gau.expanded_dim % gau.heads:
        problems.append(f"model.gau.expanded_dim={gau.expanded_dim} must be a multiple of model.gau.heads={gau.heads}")
    if (config.rotary or gau.relative_bias == "rope") and gau.shared_dim % 2:
        problems.append(f"rotary positions pair dimensions: model.gau.shared_dim={gau.shared_dim} must be even")
    return problems + divisor_problems(config, gau.attention_function)


_GAU: dict[str, Any] = {
    "keys": GATED_UNIT_KEYS,
    "defaults": {"gau.expanded_dim": times(2), "residual_init": _residual_init},
    "problems": _problems,
}
GAU_QUADRATIC = SublayerSpec(_quadratic_unit, (GAUOptions, QuadraticOptions), serves=EVERYTHING, **_GAU)
GAU_MIXED_CHUNK = SublayerSpec(
    _mixed_chunk_unit, (GAUOptions, ChunkOptions), unread=frozenset({"chunks.zero_global"}), **_GAU
)
SOFTMAX_MIXED_CHUNK = SublayerSpec(
    _mixed_chunk_heads,
    (ChunkOptions, QuadraticOptions, ConvolutionOptions),
    MULTI_HEAD_KEYS | {"normalizer", "divides"},
    problems=head_problems,
)
_UNITS: dict[str, Default] = {
    "rotary": True,
    "absolute_positions": "scaled_sinusoid",
    "norm": lambda config: "layer" if config.causal else "scale",
}
_TOEPLITZ_REACH = 512  # from the paper: a learned w up to here, rope(a)·rope(b)ᵀ above
_BY_LENGTH = {"gau.relative_bias": lambda config: "toeplitz" if config.max_length <= _TOEPLITZ_REACH else "rope"}
_PAPER = "Hua et al. 2022, arXiv:2202.10447"
ROWS = {
    "flash_quad": Family(
        (GAU_QUADRATIC, GAU_QUADRATIC),
        _UNITS | _BY_LENGTH | {"divides": "weights"},  # by the rule of studies/claims/configs/divisor.py
        about="two gated attention units (GAU), quadratic attention",
        paper=_PAPER,
    ),
    "flash": Family(
        (GAU_MIXED_CHUNK, GAU_MIXED_CHUNK),
        _UNITS | {"gau.relative_bias": "toeplitz"},
        about="two gated attention units (GAU), mixed chunk attention: quadratic within a chunk, linear across chunks",
        paper=_PAPER,
    ),
    "mc_tfm": Family(
        (SOFTMAX_MIXED_CHUNK, GLU_SPEC),
        {"rotary": True},
        about="Transformer++ with mixed chunk attention: softmax within a chunk, linear across chunks",
        paper=_PAPER,
    ),
}
