"""A family's attention by itself, for your own Flax model."""

from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from flash_lm.config.experiment import parse_model
from flash_lm.config.keys import defaults
from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import FAMILIES
from flash_lm.errors import InputError
from flash_lm.families.family import complete, served
from flash_lm.layers.mixer import Mixer

# There is no embedding, so the vocabulary (a config needs at least two words) and absolute positions are not used. How
# many layers the model will have only its owner knows.
_NOT_OF_A_MIXER = {"vocab_size": 2, "absolute_positions": "none", "residual_init": "as_init"}


def build_mixer(family: str, *, rngs: nnx.Rngs, **keys: Any) -> Mixer:
    """Builds the sublayer of a family's layer that mixes the tokens, the first of them if there are two.

        mixer = flash_lm.build_mixer("flash", model_dim=64, chunks={"size": 32}, rngs=nnx.Rngs(0))

    Args:
        family: a row of the table of families.
        rngs: random numbers for the parameters.
        keys: keys of `config.model`, see docs/keys.md; those of a section as a dict. A bidirectional mixer has
            causal=False, and max_length is then its row length.

    Raises:
        InputError: lists every problem of the keys, one a line.
    """
    values = defaults(ModelConfig).to_dict() | _NOT_OF_A_MIXER
    for name, value in {"family": family, **keys}.items():
        is_section = isinstance(values.get(name), dict)
        if is_section and not isinstance(value, dict):
            raise InputError(f"{name} is a section of keys: give a dict, such as {name}={{{_example(values[name])}}}")
        values[name] = {**values[name], **value} if is_section else value
    config = complete(parse_model(ConfigDict(values)))
    row = FAMILIES[family]
    sublayer = row.sublayers[row.mixer](config, rngs=rngs)
    return Mixer(
        sublayer,
        causal=config.causal,
        max_length=config.max_length,
        rotary_base=config.rotary_base,
        separates="packed" in served([family]),
    )


def _example(section: dict[str, Any]) -> str:
    name, value = next(iter(section.items()))
    return f"{name!r}: {value!r}"
