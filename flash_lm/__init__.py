"""Efficient-attention language models in JAX and Flax NNX: train, measure, ablate, decode."""

import importlib
from typing import TYPE_CHECKING, Any

from flash_lm.config.registry import fill

if TYPE_CHECKING:
    from flash_lm.data.corpora import register_corpus
    from flash_lm.data.tasks import register_task
    from flash_lm.families.family import register_family
    from flash_lm.inference.api import LoadedModel, load
    from flash_lm.inference.import_hf import import_hf
    from flash_lm.models.language_model import LanguageModel, build_model
    from flash_lm.models.mixer import build_mixer
    from flash_lm.models.output_heads import register_head
    from flash_lm.training.optimizer import register_optimizer

__all__ = [
    "LanguageModel",
    "LoadedModel",
    "build_mixer",
    "build_model",
    "import_hf",
    "load",
    "register_corpus",
    "register_family",
    "register_head",
    "register_optimizer",
    "register_task",
]

_MODULES = {
    "LanguageModel": "flash_lm.models.language_model",
    "LoadedModel": "flash_lm.inference.api",
    "build_mixer": "flash_lm.models.mixer",
    "build_model": "flash_lm.models.language_model",
    "import_hf": "flash_lm.inference.import_hf",
    "load": "flash_lm.inference.api",
    "register_corpus": "flash_lm.data.corpora",
    "register_family": "flash_lm.families.family",
    "register_head": "flash_lm.models.output_heads",
    "register_optimizer": "flash_lm.training.optimizer",
    "register_task": "flash_lm.data.tasks",
}


def __getattr__(name: str) -> Any:
    """Imports a name on first use: JAX takes a second to import, and --help does not need it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fill()  # before a user's rows
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
