"""Declares the config schema: each group is a frozen dataclass, and each key has a type, a default, a unit and rules.

Keys that only some rows of a table read form a section of a group: a separate dataclass beside the part that reads it.

    @section("model.gau")
    class GatedAttention:
        heads: int = key(1, "heads of a gated attention unit", at_least(1))

declares the key --config.model.gau.heads; the part reads it from `config.model[GatedAttention]`.
"""

import ctypes
import dataclasses
import functools
import json
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, dataclass_transform

from ml_collections import ConfigDict, config_dict

from flash_lm.config.registry import Rows
from flash_lm.config.renamed_keys import FOREIGN, RENAMED, UNITS
from flash_lm.errors import InputError, nearest, one_of_names

# A rule returns what was expected, or None if the value is good.
Rule = Callable[[Any], str | None]
Options = TypeVar("Options")

_LARGEST = 2**31 - 1  # of JAX's int32
_SMALLEST_FLOAT32, _LARGEST_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the smallest that is not subnormal
SECTIONS: Rows[type] = Rows()  # by name, such as model.gau; `section` adds to it
_GROUPS: dict[str, Any] = {}  # by name
_LISTED = "flash-lm keys lists the keys"


def key(default: Any, unit: str, *rules: Rule, **more: Any) -> Any:
    """Declares a key of a group.

    >>> @section("model.example")
    ... class ExampleOptions:
    ...     width: int = key(64, "channels", at_least(1))
    >>> ExampleOptions(width=8)
    ExampleOptions(width=8)

    Args:
        default: None leaves it open: it is filled in as the unit says, before it is read.
        unit: what the key means, for docs/keys.md.
        rules: checks of its values, in addition to its type.
        more: `before`, for a key whose default differs from what runs did before the key existed, or before its
            default changed: the value that matches what they did. They load with it, and keep their hash. `same`:
            values that make the same run as the default, up to rounding, such as an implementation: a tuple; a run
            with one of them has the same hash.
    """
    about = {"unit": unit, "rules": rules, "open": default is None, **more}
    return dataclasses.field(default=default, metadata=about)


def one_of(*values: str) -> Rule:
    """Makes a rule: the value is one of these names.

    >>> one_of("layer", "rms")("batch")
    'one of layer, rms'
    """
    return lambda x: one_of_names(x, values)


def at_least(low: float) -> Rule:
    """Makes a rule: a number of at least `low`.

    >>> at_least(1)(0)
    '1 or more, and at most ...'
    >>> at_least(1)(2) is None
    True
    """
    most = _LARGEST
    return lambda x: None if math.isfinite(x) and low <= x <= most else f"{low} or more, and at most {most:,}"


def above(low: float) -> Rule:
    """Makes a rule: a number greater than `low`."""
    return lambda x: None if math.isfinite(x) and x > low else f"more than {low}"


def below(high: float) -> Rule:
    """Makes a rule: a number less than `high`."""
    return lambda x: None if math.isfinite(x) and x < high else f"less than {high}"


def fraction(x: float) -> str | None:
    """A rule: a number of at least 0 and less than 1."""
    return None if 0 <= x < 1 else "at least 0 and less than 1"


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(key,))
def section(name: str) -> Callable[[type[Options]], type[Options]]:
    """Makes a class a frozen dataclass whose keys are a section.

    Args:
        name: a group and the section's name in it, such as model.gau.

    Raises:
        InputError: the name is not possible or already taken, or a key is not declared with `key`.
    """
    group, _, name_in_group = name.partition(".")
    # The name must be free, and a valid key.
    if group not in _GROUPS or not name_in_group.isidentifier():
        raise InputError(f"section {name}: name a group ({', '.join(_GROUPS)}) and a section of it, such as model.mine")
    if name_in_group in {field.name for field in dataclasses.fields(_GROUPS[group])}:
        raise InputError(f"section {name}: this is already a key: choose another name")

    def add(cls: type[Options]) -> type[Options]:
        made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        if wrong := [field.name for field in dataclasses.fields(made) if "rules" not in field.metadata]:
            raise InputError(f"section {name}: declare {', '.join(wrong)} with key(default, unit, …)")
        # The same class may register again, when a notebook cell runs twice.
        before = SECTIONS.registered.get(name)
        if before is not None and (before.__module__, before.__qualname__) != (made.__module__, made.__qualname__):
            raise InputError(f"{before.__module__} already has a section {name}: choose another name")
        SECTIONS.registered[name] = made  # a notebook cell may run again
        return made

    return add


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A group of keys, which may have sections: `config[GatedAttention]` is one of them.

    A subclass declares its name in a config: class ModelConfig(Group, name="model").
    """

    group: typing.ClassVar[str]
    sections: tuple[Any, ...] = ()

    def __init_subclass__(cls, name: str):
        """Registers the group under its name."""
        cls.group, _GROUPS[name] = name, cls

    def __getitem__(self, kind: type[Options]) -> Options:
        """The section of this class.

        Raises:
            KeyError: this config is `shared`, without sections, or is older than the section.
        """
        for options in self.sections:
            if type(options) is kind:  # not a subclass
                return options
        raise KeyError(f"{kind.__name__} is not a section of this config")

    @property
    def shared(self) -> typing.Self:
        """The group without its sections."""
        return dataclasses.replace(self, sections=())

    def get(self, name: str) -> Any:
        """The value of a key, such as "rotary" or "gau.heads"."""
        *parents, last = name.split(".")
        return getattr(self[self._section(parents[0])] if parents else self, last)

    def put(self, name: str, value: Any) -> typing.Self:
        """A copy with another value of a key."""
        # Groups are frozen: replace the key in its section, and the section in the group.
        *parents, last = name.split(".")
        if not parents:
            return dataclasses.replace(self, **{last: value})
        kind = self._section(parents[0])
        changed = dataclasses.replace(self[kind], **{last: value})
        sections = tuple(changed if type(options) is kind else options for options in self.sections)
        return dataclasses.replace(self, sections=sections)

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        return []

    def _section(self, name: str) -> Any:
        return SECTIONS[f"{self.group}.{name}"]


class Key(typing.NamedTuple):
    """One key of the schema, with its full name."""

    name: str
    kind: type
    about: Mapping[str, Any]
    default: Any

    @property
    def reference(self) -> Any:
        """The value of runs that do not name the key."""
        return _reference(self.about, self.default)


_type_hints = functools.cache(typing.get_type_hints)  # Python parses each annotation again at every call


def members(cls: type) -> dict[str, type]:
    """Names and types of a group's keys, groups and sections; sections are sorted, since the import order varies."""
    hints = _type_hints(cls)
    # A group has the sections that are registered for it, in alphabetical order.
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.name != "sections"}
    if not issubclass(cls, Group):
        return fields
    prefix = f"{cls.group}."
    return fields | {
        name.removeprefix(prefix): kind for name, kind in sorted(SECTIONS.items()) if name.startswith(prefix)
    }


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """All keys below a group, with their full names."""
    # Depth first, so that the keys of a section follow each other.
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, kind in members(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from keys(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield Key(prefix + name, kind, fields[name].metadata, fields[name].default)


def key_names(kind: type) -> set[str]:
    """Full names of a section's keys."""
    (name,) = (name for name, one in SECTIONS.items() if one is kind)
    return {one.name for one in keys(kind, f"{name}.")}


def defaults(cls: type) -> ConfigDict:
    """Makes a config with the default of each key."""
    # Keys without a default are placeholders of their type.
    config, fields = ConfigDict(), {field.name: field for field in dataclasses.fields(cls)}
    for name, kind in members(cls).items():
        if dataclasses.is_dataclass(kind):
            config[name] = defaults(typing.cast(type, kind))
        else:
            default = fields[name].default
            config[name] = config_dict.placeholder(kind) if default is None else default
    return config


def upgrade(values: dict[str, Any], cls: type) -> dict[str, Any]:
    """Adds to a config the keys that are newer than it, at the values that match what its run did."""
    # A key that the config lacks gets the value that runs had before the key existed.
    upgraded, fields = dict(values), {field.name: field for field in dataclasses.fields(cls)}
    for name, kind in members(cls).items():
        if not dataclasses.is_dataclass(kind):
            upgraded.setdefault(name, _reference(fields[name].metadata, fields[name].default))
        elif name not in fields or (isinstance(values.get(name), dict) and values[name]):
            # A section may be newer than the config. A missing or empty group is damaged: `type_problems` says so.
            upgraded[name] = upgrade(values.get(name, {}), typing.cast(type, kind))
    return upgraded


def identifying_keys(flat: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """The keys of a config that enter its hash, so that adding a key changes no hash.

    Args:
        flat: values by full name; tuples may be lists.
        cls: the class of the config.

    Returns:
        `flat` without the keys at the value that a run has which does not name them, or one that is the same.
    """
    # A former name has the references of all keys that it became.
    references = {one.name: [one.reference] for one in keys(cls)}
    for former, names in RENAMED.items():
        references[former] = [value for name in names for value in references[name]]
    # In JSON a tuple equals a list, and True does not equal 1.
    is_reference = lambda name, value: (
        name in references and {json.dumps(x) for x in references[name]} == {json.dumps(value)}
    )
    same = {one.name: one.about["same"] for one in keys(cls) if "same" in one.about}
    return {
        name: value for name, value in flat.items() if not (is_reference(name, value) or value in same.get(name, ()))
    }


def _reference(about: Mapping[str, Any], default: Any) -> Any:
    return about.get("before", default)


def build(cls: type, values: dict[str, Any], prefix: str, problems: list[str]) -> Any:
    """Checks the values of one group, and collects its problems.

    Args:
        cls: the class of the group or section.
        values: a nested dict of plain values.
        prefix: the prefix of its keys, such as "model.".
        problems: a list to which problems are added, a sentence each.

    Returns:
        The group; None if it has a problem, since its cross-checks would then be misleading.
    """
    fields, known = {field.name: field for field in dataclasses.fields(cls)}, members(cls)
    problems.extend(unknown_key(prefix, name, list(known)) for name in sorted(values.keys() - known.keys()))
    # Sections, groups and keys are checked one by one; only a group without problems can be built and cross-checked.
    before, arguments, sections = len(problems), {}, []
    for name, kind in known.items():
        if name not in fields:  # a config made before the section was imported lacks it
            section_values = values.get(name, dataclasses.asdict(typing.cast(Any, kind)()))
            sections.append(build(kind, section_values, f"{prefix}{name}.", problems))
        elif name not in values:
            problems.append(f"{prefix}{name} is missing: start the config from configs/base.py")
        elif dataclasses.is_dataclass(kind):
            arguments[name] = build(typing.cast(type, kind), values[name], f"{prefix}{name}.", problems)
        else:
            arguments[name] = _check_value(prefix + name, values[name], kind, fields[name].metadata, problems)
    if len(problems) > before:
        return None
    built = cls(**arguments, **({"sections": tuple(sections)} if sections else {}))
    problems.extend(built.problems() if hasattr(built, "problems") else [])
    return built


def _check_value(name: str, value: Any, kind: type, about: Mapping[str, Any], problems: list[str]) -> Any:
    if value is None and about["open"]:
        return None
    if kind is float and type(value) is int:
        value = float(value)
    # type() and not isinstance(): a bool is an int, but must not be accepted as one.
    if type(value) is not kind:
        problems.append(f"{name}={value!r} must be of type {kind.__name__}")
        return value
    wrong = [f"{name}={value} must be {expected}" for rule in about["rules"] if (expected := rule(value))]
    if kind is float and not wrong:
        wrong = _wrong_in_float32(name, value, about["rules"])
    problems.extend(wrong)
    return value


def type_problems(values: Mapping[str, Any], cls: type, prefix: str = "") -> Iterator[str]:
    """Yields a sentence on each group or key of a config that is missing or of a wrong type; no rule is checked."""
    # Only types are checked, not the rules.
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, kind in members(cls).items():
        if name not in values:
            yield f"{prefix}{name} is missing"
        elif dataclasses.is_dataclass(kind):
            if isinstance(values[name], Mapping):
                yield from type_problems(values[name], typing.cast(type, kind), f"{prefix}{name}.")
            else:
                yield f"{prefix}{name} is no group of keys"
        else:
            problems: list[str] = []
            _check_value(prefix + name, values[name], kind, {**fields[name].metadata, "rules": ()}, problems)
            yield from problems


def _wrong_in_float32(name: str, value: Any, rules: Iterable[Rule]) -> list[str]:
    """The problems of a good number once a device has rounded it to float32, where subnormal ones become 0."""
    # Check the rules again for the value that the device will have.
    rounded = ctypes.c_float(value).value
    if math.isinf(rounded):
        return [f"{name}={value} is infinite in float32: it must be at most {_LARGEST_FLOAT32:.3g}"]
    if abs(rounded) < _SMALLEST_FLOAT32:
        rounded = 0.0
    expected = [text for rule in rules if (text := rule(rounded))]
    if value and not rounded and not expected:
        expected = [f"0, or {_SMALLEST_FLOAT32:.3g} or more"]
    return [f"{name}={value} is {rounded:g} in float32: it must be {text}" for text in expected]


def unknown_key(prefix: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown key: its name today, ours for another library's, or the most similar one."""
    if prefix + name in RENAMED:
        return f"{prefix}{name} is now {' and '.join(RENAMED[prefix + name])}: {_LISTED}"
    if name in FOREIGN:
        ours = FOREIGN[name]
        unit = f" ({UNITS[ours]})" if ours in UNITS else ""
        return f"unknown key {prefix}{name}: did you mean {ours}?{unit}"
    # A key of another group, a misspelt key of this group, or of any.
    names = [one.name for group, cls in _GROUPS.items() for one in keys(cls, f"{group}.")]
    meant = [full for full in names if full.endswith(f".{name}")]
    if not meant and (near := nearest(name, known)):
        meant = [prefix + near]
    last = {full.rpartition(".")[2]: full for full in reversed(names)}
    if not meant and (near := nearest(name, last)):
        meant = [last[near]]
    advice = f"did you mean {' or '.join(meant)}?" if meant else _LISTED
    return f"unknown key {prefix}{name}: {advice}"
