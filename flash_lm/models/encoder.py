"""The encoder of a model: layers over the source, whose features its cross attention reads."""

import dataclasses

from flash_lm.config.keys import at_least, key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import FAMILIES
from flash_lm.layers.cross_attention import CrossOptions
from flash_lm.models.cross import CROSS
from flash_lm.models.part import Part


@section("model.encoder")
class EncoderOptions:
    """Options of a model with an encoder; it has the keys of the model, but for these."""

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


def encoder_of(config: ModelConfig) -> ModelConfig:
    """The config of the encoder of a complete config; its layers are completed by `of_layers`."""
    own = config[EncoderOptions]
    layers = own.num_layers or config.num_layers
    changed = dataclasses.replace(
        config,
        family=own.family,
        pattern=(),
        num_layers=layers,
        causal=False,
        norm=own.norm,
        absolute_positions=own.absolute_positions,
    )
    return changed.put("encoder.family", None)


def parts_of(layer: ModelConfig) -> tuple[Part, ...]:
    """The parts of a layer: its family's, and cross attention if the model has an encoder."""
    row = FAMILIES[layer.family]
    if layer.encoder is None:
        return row.sublayers
    cut = row.mixer + 1
    return *row.sublayers[:cut], CROSS[layer[CrossOptions].kind], *row.sublayers[cut:]


def is_cross(part: Part) -> bool:
    """Whether a part reads an encoder."""
    return any(part is one for one in CROSS.values())
