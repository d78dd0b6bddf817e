"""The table of families: what one layer is made of, and what the keys left open become.

To add a family: write its mathematics in ops/, wrap it in layers/, add a row here and a file in configs/.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from flash_lm.config import Config, ModelConfig
from flash_lm.errors import InputError
from flash_lm.layers.aft import AFTCore, AttentionFreeUnit, ConvCore, FactorisedCore
from flash_lm.layers.attention import GatedAttentionUnit, MultiHeadAttention
from flash_lm.layers.favor_core import FavorCore
from flash_lm.layers.feed_forward import GLU, MLP
from flash_lm.layers.linear_core import LinearCore
from flash_lm.layers.mixed_chunk_core import MixedChunkCore
from flash_lm.layers.quadratic_core import QuadraticCore
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.linear_attention import elu_plus_one
from flash_lm.ops.logistics import VALUES

_log = logging.getLogger(__name__)


def softmax_attention(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Multi-head softmax attention."""
    return MultiHeadAttention(QuadraticCore("softmax", "none", config, rngs=rngs), config, rngs=rngs)


def gau_quadratic(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Gated attention unit over all pairs of tokens."""
    core = QuadraticCore(config.attention_function, config.relative_bias, config, rngs=rngs)
    return GatedAttentionUnit(core, config, rngs=rngs)


def gau_mixed_chunk(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Gated attention unit over mixed chunks."""
    core = MixedChunkCore(config.attention_function, config.relative_bias, config, rngs=rngs)
    return GatedAttentionUnit(core, config, rngs=rngs)


def softmax_mixed_chunk(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Multi-head mixed chunk attention, softmax inside the chunk."""
    core = MixedChunkCore("softmax", "none", config, rngs=rngs)
    return MultiHeadAttention(core, config, rngs=rngs, scale_offsets=True)


def linear_attention(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Multi-head linear attention with the features elu(x) + 1."""
    return MultiHeadAttention(LinearCore(elu_plus_one, config, rngs=rngs), config, rngs=rngs)


def favor_attention(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Multi-head attention whose softmax is estimated by random features."""
    return MultiHeadAttention(FavorCore(config, rngs=rngs), config, rngs=rngs)


def aft_full(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Attention-free unit with a position bias for all pairs."""
    return AttentionFreeUnit(FactorisedCore(None, config, rngs=rngs), config, rngs=rngs)


def aft_local(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Attention-free unit with a position bias inside a window."""
    return AttentionFreeUnit(FactorisedCore(config.window_size, config, rngs=rngs), config, rngs=rngs)


def aft_simple(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Attention-free unit without a position bias."""
    return AttentionFreeUnit(AFTCore(config, rngs=rngs), config, rngs=rngs)


def aft_conv(config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
    """Attention-free unit with a filter a head."""
    return AttentionFreeUnit(ConvCore(config, rngs=rngs), config, rngs=rngs)


def _num_features(config: ModelConfig) -> int:
    """K ln K, which the estimate's error asks for (Performer, section 2.4), rounded up to a multiple of 8."""
    width = max(config.model_dim // config.num_heads, 2)
    return math.ceil(width * math.log(width) / 8) * 8


# An open key's value, or what gives it from the config.
Default = Any | Callable[[ModelConfig], Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """One row: the sublayers of a layer, the defaults of its open keys, and the keys that only some families use."""

    pattern: tuple[Callable[..., Sublayer], ...]
    defaults: Mapping[str, Default]
    keys: frozenset[str]


_COMMON = {
    "causal": True,
    "rotary": False,
    "norm": "layer",
    "relative_bias": "none",
    "normalizer": lambda config: "count" if config.causal else str(config.max_length),
    "expanded_dim": lambda config: 2 * config.model_dim,
    "mlp_dim": lambda config: 4 * config.model_dim,
    "num_features": _num_features,
}
_LEARNED = _COMMON | {"absolute_positions": "learned"}
_ROTARY = _COMMON | {"rotary": True, "absolute_positions": "none"}
# Two thirds of an MLP's width, so that three matrices have the parameters of two.
_GLU = _ROTARY | {"mlp_dim": lambda config: -(-8 * config.model_dim // 3 // 8) * 8}
# A key a head and not one a channel leaves D² parameters for the MLP, so that num_layers means the same size.
_FILTERS = _LEARNED | {"mlp_dim": lambda config: -(-9 * config.model_dim // 2 // 8) * 8}
_GAU = _ROTARY | {
    "absolute_positions": "scaled_sinusoid",
    "norm": lambda config: "layer" if config.causal else "scale",
}
_TOEPLITZ_REACH = 512  # the paper's: a learned w up to here, rope(a)·rope(b)ᵀ above

_MLP = frozenset({"mlp_dim"})
_HEADS = _MLP | {"num_heads", "rotary"}
_FACTORS = frozenset({"bias_dim", "bias_rate"})
_WINDOW = frozenset({"window_size"})
_FEATURES = frozenset({"num_features", "redraw_features"})
_UNITS = frozenset(
    {
        "rotary",
        "expanded_dim",
        "shared_dim",
        "gau_heads",
        "query_key",
        "relative_bias",
        "attention_function",
        "normalizer",
    }
)
_QUADRATIC = frozenset({"attention_implementation"})
_KERNELS = frozenset({"kernels"})
_CHUNK = frozenset({"chunk_size"})
_CHUNKS = _CHUNK | {"local_attention", "overlapping_chunks", "global_attention", "normalizer"}
_SOME_USE = _HEADS | _UNITS | _QUADRATIC | _KERNELS | _CHUNKS | _FACTORS | _WINDOW | _FEATURES

FAMILIES = {
    "transformer": Family((softmax_attention, MLP), _LEARNED, _HEADS | _QUADRATIC),
    "transformer_plus": Family((softmax_attention, MLP), _ROTARY, _HEADS | _QUADRATIC),
    "transformer_plus_plus": Family((softmax_attention, GLU), _GLU, _HEADS | _QUADRATIC),
    "flash_quad": Family(
        (gau_quadratic, gau_quadratic),
        _GAU | {"relative_bias": lambda config: "toeplitz" if config.max_length <= _TOEPLITZ_REACH else "rope"},
        _UNITS | _QUADRATIC | _KERNELS,
    ),
    "flash": Family(
        (gau_mixed_chunk, gau_mixed_chunk), _GAU | {"relative_bias": "toeplitz"}, _UNITS | _KERNELS | _CHUNKS
    ),
    "mc_tfm": Family((softmax_mixed_chunk, GLU), _GLU, _HEADS | _CHUNKS),
    "aft_full": Family((aft_full, MLP), _LEARNED, _MLP | _FACTORS),
    "aft_local": Family((aft_local, MLP), _LEARNED, _MLP | _FACTORS | _WINDOW),
    "aft_simple": Family((aft_simple, MLP), _LEARNED, _MLP),
    "aft_conv": Family((aft_conv, MLP), _FILTERS, _MLP | {"num_heads"} | _WINDOW),
    "linear_transformer": Family((linear_attention, MLP), _LEARNED, _HEADS | _KERNELS | _CHUNK),
    "performer": Family((favor_attention, MLP), _LEARNED, _HEADS | _CHUNK | _FEATURES),
}


def complete(config: ModelConfig) -> ModelConfig:
    """Fills in the open keys with the family's defaults.

    Args:
        config: validated, with open keys.

    Returns:
        The config with nothing left open.

    Raises:
        InputError: unknown family, a vocabulary that nobody has given, or widths that do not go together.
    """
    if config.family not in FAMILIES:
        raise InputError(f"model.family={config.family} must be one of {', '.join(FAMILIES)}")
    if config.vocab_size is None:
        raise InputError("model.vocab_size is open: set it, or let the tokenizer of a training run give it")
    family = FAMILIES[config.family]
    for key, default in family.defaults.items():
        if getattr(config, key) is None:
            value = default(config) if callable(default) else default
            config = dataclasses.replace(config, **{key: value})
    if problems := _width_problems(config, family):
        raise InputError.of(problems)
    _log.info("family %s does not use model.%s", config.family, ", model.".join(sorted(unused(config.family))))
    return config


def unused(family: str) -> frozenset[str]:
    """Keys of `config.model` that other families use, and this one does not."""
    return _SOME_USE - FAMILIES[family].keys


def complete_config(config: Config) -> Config:
    """A whole experiment with the model's open keys filled in, for want of a corpus.

    An open vocabulary is that of the tokenizer to train. Raises as `complete` does.
    """
    vocab_size = config.model.vocab_size or config.data.vocab_size
    return dataclasses.replace(config, model=complete(dataclasses.replace(config.model, vocab_size=vocab_size)))


def _width_problems(config: ModelConfig, family: Family) -> list[str]:
    """Sentences on widths that cannot be split as this family needs."""
    found, dim, heads = [], config.model_dim, config.num_heads
    if "num_heads" in family.keys:
        if dim % heads:
            found.append(f"model.model_dim={dim} must be a multiple of model.num_heads={heads}")
        elif config.rotary and "rotary" in family.keys and dim // heads % 2:
            found.append(f"model.rotary pairs up dimensions: the head width {dim} / {heads} must be even")
    if "gau_heads" in family.keys and config.expanded_dim % config.gau_heads:
        found.append(
            f"model.expanded_dim={config.expanded_dim} must be a multiple of model.gau_heads={config.gau_heads}"
        )
    if "shared_dim" in family.keys and (config.rotary or config.relative_bias == "rope") and config.shared_dim % 2:
        found.append(f"rotary positions pair up dimensions: model.shared_dim={config.shared_dim} must be even")
    if "sinusoid" in config.absolute_positions and dim % 2:
        found.append(f"sinusoids come in pairs: model.model_dim={dim} must be even")
    if config.head == "logistics" and config.vocab_size < VALUES:
        found.append(f"model.head=logistics is over {VALUES} values, and model.vocab_size={config.vocab_size}")
    if config.family == "aft_conv" and not config.window_size:
        found.append("model.family=aft_conv needs a filter of one tap or more: raise --config.model.window_size")
    return found
