"""Registers the built-in formats: the rows of each module here, in its `ROWS`."""

import importlib
import pkgutil

from flash_lm.models import formats
from flash_lm.models.formats.format import register_format

for _module in pkgutil.iter_modules(formats.__path__):
    if _module.name != "table":
        for _name, _row in getattr(importlib.import_module(f"{formats.__name__}.{_module.name}"), "ROWS", {}).items():
            register_format(_name, _row)
