"""Settings of another library's model from and to keys of `config.model`."""

from typing import Any

from flash_lm.config.model import ModelConfig
from flash_lm.errors import InputError
from flash_lm.models.formats.format import COMMON, Format, Settings

_LARGEST = 2**31


def write_problems(row: Format, config: ModelConfig) -> list[str]:
    """Why a model with a complete config cannot be written in a format; empty if it can."""
    if row.one_way:
        return [row.one_way]
    wrong = {key: value for key, value in {**COMMON, **row.ours}.items() if config.get(key) != value}
    # Further reasons make sense only in a model of the right kind.
    keys = [f"model.{key}={config.get(key)}, not {value}" for key, value in wrong.items()]
    return keys or row.problems(config)


def to_settings(row: Format, config: ModelConfig) -> dict[str, Any]:
    """The settings of a model in another format.

    Args:
        row: the format.
        config: a complete config for which `write_problems` is empty.
    """
    return {
        **{setting.name: config.get(key) for key, setting in row.keys.items()},
        **row.theirs,
        **row.write(config),
    }


def to_keys(row: Format, settings: Settings) -> dict[str, Any]:
    """Keys of `config.model` from another library's settings.

    Raises:
        InputError: settings are damaged, or flash_lm does not support them; lists all of them.
    """
    # Sizes and switches by name.
    values = {**row.defaults, **settings}
    kinds = {**{setting.name: setting.kind for setting in row.keys.values()}, **row.needs}
    if wrong := [f"{name}={values.get(name)}" for name, kind in kinds.items() if not is_a(kind, values.get(name))]:
        raise InputError(f"config.json has {', '.join(wrong)}: it is damaged, or the model is not of {row.title}")

    # Everything else must be as in our model.
    keys = {key: values[setting.name] for key, setting in row.keys.items()}
    fixed = {**row.theirs, **row.inactive}
    wrong = [f"{name}={values[name]}" for name, good in fixed.items() if values.get(name, good) != good]
    more, unread = row.read(values)
    if wrong := wrong + unread:
        raise InputError(f"config.json has {', '.join(wrong)}, which flash_lm does not support")
    floats = {key: float(x) for key, x in keys.items() if row.keys[key].kind is float}
    return {**COMMON, **row.ours, **keys, **floats, **more}


def is_a(kind: type, value: Any) -> bool:
    """Whether a setting has this type; a number must be positive, and of a size that an array can have."""
    if kind not in (int, float):
        return isinstance(value, kind)
    number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    return number and 0 < value < _LARGEST
