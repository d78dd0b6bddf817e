"""Encoder-decoder models: the encoder's config, and cross attention from the decoder to its features."""

import dataclasses
from typing import Any

from flax import nnx

from flash_lm.config.keys import at_least, key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import FAMILIES
from flash_lm.families.feed_forward import choose_feed_forward
from flash_lm.families.sublayer_spec import SublayerSpec
from flash_lm.layers.cross_attention import CrossAttention, CrossGatedUnit, CrossOptions, CrossSublayer
from flash_lm.layers.cross_core import PairsCore, SumsCore
from flash_lm.layers.quadratic_core import QuadraticOptions


@section("model.encoder")
class EncoderOptions:
    """Options of the encoder; all other keys are those of the model."""

    family: str = key(
        None,
        "a family with a bidirectional form: its layers read the source, and each layer of the model gets a sublayer "
        "of cross attention (model.cross) after the one that mixes the tokens; open: no encoder",
        FAMILIES.rule,
    )
    num_layers: int = key(None, "layers of the encoder; open: model.num_layers", at_least(1))
    norm: str = key(
        None, "open: model.norm, if it is set, or from the encoder's family", one_of("layer", "rms", "scale")
    )
    absolute_positions: str = key(
        None,
        "open: model.absolute_positions, if it is set, or from the encoder's family",
        one_of("none", "learned", "sinusoid", "scaled_sinusoid"),
    )


def _softmax(config: ModelConfig, cross: CrossOptions, quadratic: QuadraticOptions, *, rngs: nnx.Rngs) -> CrossSublayer:
    return CrossAttention(config, cross, PairsCore(config, quadratic, "softmax"), rngs=rngs)


def _linear(config: ModelConfig, cross: CrossOptions, *, rngs: nnx.Rngs) -> CrossSublayer:
    return CrossAttention(config, cross, SumsCore(), rngs=rngs)


def _gau(config: ModelConfig, cross: CrossOptions, quadratic: QuadraticOptions, *, rngs: nnx.Rngs) -> CrossSublayer:
    return CrossGatedUnit(config, cross, PairsCore(config, quadratic, cross.attention_function), rngs=rngs)


def _cross_problems(config: ModelConfig) -> list[str]:
    cross = config[CrossOptions]
    if cross.kind != "gau" and config.head_dim is not None:
        return []
    name, width = ("expanded_dim", cross.expanded_dim) if cross.kind == "gau" else ("model_dim", config.model_dim)
    width_key = f"model.cross.{name}" if cross.kind == "gau" else f"model.{name}"
    return [f"{width_key}={width} must be a multiple of model.cross.heads={cross.heads}"] if width % cross.heads else []


_HEAD_SPEC: dict[str, Any] = {
    "keys": frozenset({"num_heads", "head_dim", "query_key_norm"}),
    "unread": frozenset({"cross.expanded_dim", "cross.shared_dim", "cross.attention_function"}),
    "defaults": {"cross.heads": lambda config: config.num_heads},
    "problems": _cross_problems,
}
# model.cross.kind -> the sublayer of cross attention, inserted in each layer after the sublayer that mixes the tokens
CROSS = {
    "softmax": SublayerSpec(_softmax, (CrossOptions, QuadraticOptions), **_HEAD_SPEC),
    "linear": SublayerSpec(_linear, (CrossOptions,), **_HEAD_SPEC),
    "gau": SublayerSpec(
        _gau,
        (CrossOptions, QuadraticOptions),
        defaults={"cross.heads": 1, "cross.expanded_dim": lambda config: 2 * config.model_dim},
        problems=_cross_problems,
    ),
}


def encoder_config(config: ModelConfig) -> ModelConfig:
    """The config of the encoder of a complete config; `layer_configs` completes its layers."""
    # Keys of the encoder replace those of the model; all others are shared.
    options = config[EncoderOptions]
    layers = options.num_layers or config.num_layers
    changed = dataclasses.replace(
        config,
        family=options.family,
        pattern=(),
        num_layers=layers,
        causal=False,
        norm=options.norm,
        absolute_positions=options.absolute_positions,
    )
    return changed.put("encoder.family", None)


def sublayer_specs(layer: ModelConfig) -> tuple[SublayerSpec, ...]:
    """The specs of a layer's sublayers: its family's, and cross attention if the model has an encoder."""
    row = FAMILIES[layer.family]
    sublayers = choose_feed_forward(row.sublayers, layer)
    if layer.encoder is None:
        return sublayers
    # Cross attention follows the sublayer that mixes the tokens.
    cut = row.mixer + 1
    return *sublayers[:cut], CROSS[layer[CrossOptions].kind], *sublayers[cut:]


def is_cross(spec: SublayerSpec) -> bool:
    """Whether a sublayer is cross attention."""
    return any(spec is one for one in CROSS.values())
