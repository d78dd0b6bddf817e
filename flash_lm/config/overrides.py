"""Applies command-line overrides to a config: --config.KEY=VALUE."""

import ast
import typing
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from flash_lm.config.experiment import open_type
from flash_lm.config.keys import unknown_key
from flash_lm.config.registry import CORPORA
from flash_lm.config.renamed_keys import FOREIGN, UNITS
from flash_lm.errors import InputError


def apply_overrides(config: ConfigDict, overrides: list[str]) -> None:
    """Applies command-line words to a config; another corpus brings the data.pack that it needs, unless a word sets it.

    Raises:
        InputError: overrides are wrong, one per line.
    """
    problems = [problem for word in overrides if (problem := override(config, word))]
    if problems:
        raise InputError.of(problems)
    names = {word.partition("=")[0] for word in overrides}
    if "--config.data.corpus" in names and "--config.data.pack" not in names:
        fit_pack(config)


def fit_pack(config: Any) -> None:
    """Sets data.pack to what a corpus needs: examples if it consists of them, else not."""
    kind = CORPORA.get(config.data.corpus)
    if kind and not config.data.pair_column and kind.examples != (config.data.pack == "examples"):
        config.data.pack = "examples" if kind.examples else "stream"


def variant(config: ConfigDict, word: str) -> tuple[str, ConfigDict]:
    """Parses a word such as flash+kernels=xla+train.loss_chunk=8192 into a family and the config with these keys.

    Keys are the model's, unless they name a group of the config.

    Raises:
        InputError: some of the keys are wrong.
    """
    family, *changes = word.split("+")
    changed = config.copy_and_resolve_references()
    group = lambda change: "" if isinstance(config.get(change.partition(".")[0]), ConfigDict) else "model."
    apply_overrides(changed, [f"--config.{group(change)}{change}" for change in changes])
    return family, changed


def override(config: ConfigDict, word: str) -> str | None:
    """Applies one --config.key=value; returns what is wrong with it, if anything."""
    name, equals, text = word.partition("=")
    if not name.startswith("--config.") or not equals:
        return _not_an_override(config, name, equals + text)
    # Walk down to the group of the key.
    *parents, key = name.removeprefix("--config.").split(".")
    prefix, node = "", typing.cast(Any, config)
    for parent in parents:
        if not isinstance(node.get(parent), ConfigDict):
            return unknown_key(prefix, parent, list(node))
        prefix, node = f"{prefix}{parent}.", node[parent]
    if key not in node:
        return unknown_key(prefix, key, list(node))
    # Parse the text as the type of the key, or as open.
    kind = node.get_type(key)
    if kind is ConfigDict:
        return f"{prefix}{key} is a group of keys: set one of them, such as {prefix}{key}.{next(iter(node[key]))}"
    if (open_as := open_type(prefix + key)) is not None:
        if not text:
            node[key] = None
            return None
        kind = open_as  # the config of a run that left it open does not have the type
    try:
        node[key] = (_PARSERS.get(kind) or kind)(text)
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        return f"{prefix}{key}={text} must be of type {kind.__name__}"
    return None


def _not_an_override(config: Any, flag: str, rest: str) -> str:
    """What is wrong with a word that is no --config.KEY=VALUE: perhaps it is one without its prefix, or its =."""
    name = flag.removeprefix("--")
    dashes = flag.removesuffix(name)
    if name.startswith("config."):
        return f"--{name} needs its value after =, as in --{name}=VALUE"
    if rest.startswith("=") and (ours := _key_of(config, name)):
        if ours in UNITS and name in FOREIGN:
            return f"unknown argument --{name}{rest}: did you mean --config.{ours}=…? ({UNITS[ours]})"
        return f"unknown argument --{name}{rest}: did you mean --config.{ours}{rest}?"
    return (
        f"unknown argument {dashes}{name}{rest}: keys look like --config.model.num_layers=4, other flags are in --help"
    )


def _key_of(config: Any, name: str) -> str | None:
    """The key that a name without --config. may mean: ours for a synonym, or that name in any group."""
    group, dot, _ = name.partition(".")
    if dot:
        return name if group in config else None
    if name in FOREIGN:
        return FOREIGN[name]
    if name in config and not isinstance(config[name], ConfigDict):
        return name
    groups = [group for group in config if isinstance(config[group], ConfigDict)]
    return next((f"{group}.{name}" for group in groups if name in config[group]), None)


def parse_tuple(text: str) -> tuple[Any, ...]:
    """Parses a tuple: in the form of Python, or words between commas or spaces."""
    if text.startswith(("(", "[", "{", "'", '"')):
        value = ast.literal_eval(text)
        return tuple(value) if isinstance(value, tuple | list) else (value,)
    return tuple(_literal(word) for word in text.replace(",", " ").split())


def _literal(word: str) -> Any:
    """A number, or the word itself, such as a name or a regex."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


_BOOLS = {"true": True, "1": True, "false": False, "0": False}


_PARSERS: dict[type, Callable[[str], Any]] = {bool: lambda text: _BOOLS[text.lower()], tuple: parse_tuple}
