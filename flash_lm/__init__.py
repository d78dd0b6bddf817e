"""Efficient-attention language models in JAX and Flax NNX: train, measure, ablate, decode."""

from flash_lm.data.corpora import register_corpus
from flash_lm.data.tasks import register_task
from flash_lm.inference.importing import import_hf
from flash_lm.inference.loaded import LoadedModel, load
from flash_lm.models import families  # noqa: F401 (its rows join the table)
from flash_lm.models.family import register_family
from flash_lm.models.heads import register_head
from flash_lm.models.language_model import LanguageModel, build_model
from flash_lm.tables import CORPORA, FAMILIES, HEADS, OPTIMIZERS, TASKS
from flash_lm.training.optimizer import register_optimizer

for _table in (FAMILIES, HEADS, TASKS, CORPORA, OPTIMIZERS):
    _table.seal()

__all__ = [
    "LanguageModel",
    "LoadedModel",
    "build_model",
    "import_hf",
    "load",
    "register_corpus",
    "register_family",
    "register_head",
    "register_optimizer",
    "register_task",
]
