"""The cross attention of a model with an encoder: one sublayer of each layer, after the one that mixes the tokens."""

from typing import Any

from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.cross_attention import (
    CrossAttention,
    CrossGatedUnit,
    CrossOptions,
    CrossSublayer,
)
from flash_lm.layers.cross_core import PairsCore, SumsCore
from flash_lm.models.part import Part


def _softmax(config: ModelConfig, cross: CrossOptions, *, rngs: nnx.Rngs) -> CrossSublayer:
    return CrossAttention(config, cross, PairsCore(config, "softmax"), rngs=rngs)


def _linear(config: ModelConfig, cross: CrossOptions, *, rngs: nnx.Rngs) -> CrossSublayer:
    return CrossAttention(config, cross, SumsCore(), rngs=rngs)


def _gau(config: ModelConfig, cross: CrossOptions, *, rngs: nnx.Rngs) -> CrossSublayer:
    return CrossGatedUnit(config, cross, PairsCore(config, cross.attention_function), rngs=rngs)


def _problems(config: ModelConfig) -> list[str]:
    cross = config[CrossOptions]
    name, width = ("expanded_dim", cross.expanded_dim) if cross.kind == "gau" else ("model_dim", config.model_dim)
    whole = f"model.cross.{name}" if cross.kind == "gau" else f"model.{name}"
    return [f"{whole}={width} must be a multiple of model.cross.heads={cross.heads}"] if width % cross.heads else []


_OF_HEADS: dict[str, Any] = {
    "sections": (CrossOptions,),
    "keys": frozenset({"num_heads", "query_key_norm"}),
    "unread": frozenset({"cross.expanded_dim", "cross.shared_dim", "cross.attention_function"}),
    "defaults": {"cross.heads": lambda config: config.num_heads},
    "problems": _problems,
}
# model.cross.kind -> its part
CROSS = {
    "softmax": Part(_softmax, **_OF_HEADS),
    "linear": Part(_linear, **_OF_HEADS),
    "gau": Part(
        _gau,
        (CrossOptions,),
        defaults={"cross.heads": 1, "cross.expanded_dim": lambda config: 2 * config.model_dim},
        problems=_problems,
    ),
}
