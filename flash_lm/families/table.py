"""Registers the built-in families, in the order in which tables list them.

A module says in `ROWS` which families it has, so importing one alone changes nothing.
"""

import importlib
import pkgutil
from collections.abc import Iterator

from flash_lm import families
from flash_lm.families.family import Family, register_family

# README and the pages list families in this order; those of modules that are not named here follow, by name.
_ORDER = (
    "transformer",
    "flash",
    "aft",
    "linear_transformer",
    "performer",
    "longformer",
    "window_linear",
    "reformer",
    "adaptive_span",
    "log_sparse",
    "cosformer",
    "flowformer",
    "linformer",
    "nystromformer",
    "transformer_xl",
    "retnet",
    "mamba2",
    "gated_deltanet",
    "gla",
    "based",
    "mega",
    "rwkv4",
    "conformer",
    "lite_transformer",
)


def _rows() -> Iterator[tuple[str, Family]]:
    names = {module.name for module in pkgutil.iter_modules(families.__path__)}
    for name in (*_ORDER, *sorted(names - set(_ORDER) - {"table"})):
        module = importlib.import_module(f"{families.__name__}.{name}")
        yield from getattr(module, "ROWS", {}).items()


for _name, _row in _rows():
    register_family(_name, _row)
