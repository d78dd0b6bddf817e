"""Configs that differ from one config in a few keys."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

Changes = Mapping[str, Any]  # key of the config, such as model.chunks.size -> value
Runs = Mapping[str, Changes]  # by name


def apply_changes(config: ConfigDict, changes: Changes) -> Any:
    """Copies the config with these values: a ConfigDict, whose keys type checkers do not know."""
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict(dict(changes))
    return other
