"""Fills the registries: imports all modules that register families, heads, tasks, corpora, optimizers and others.

It imports JAX and Flax, so a registry imports it only at its first lookup.
"""

from flash_lm.config.registry import CORPORA, FAMILIES, FORMATS, HEADS, LOGGERS, OPTIMIZERS, TASKS
from flash_lm.data import tasks  # noqa: F401 (imported for their rows, as all of these)
from flash_lm.data.corpora import CHAT, HUGGING_FACE, STDLIB, TEXT, register_corpus
from flash_lm.data.couplets import COUPLETS
from flash_lm.data.images import IMAGES
from flash_lm.data.synthetic.bigrams import BIGRAMS
from flash_lm.data.synthetic.copying import COPY
from flash_lm.data.synthetic.listops import LISTOPS
from flash_lm.data.synthetic.mqar import MQAR
from flash_lm.data.synthetic.needle import NEEDLE
from flash_lm.families import table  # noqa: F401
from flash_lm.models import classifier, output_heads  # noqa: F401
from flash_lm.models.formats import table as formats_table  # noqa: F401
from flash_lm.training import loggers, optimizer  # noqa: F401

for _name, _row in {
    "stdlib": STDLIB,
    "text": TEXT,
    "hf": HUGGING_FACE,
    "chat": CHAT,
    "couplets": COUPLETS,
    "images": IMAGES,
    "copy": COPY,
    "mqar": MQAR,
    "bigrams": BIGRAMS,
    "needle": NEEDLE,
    "listops": LISTOPS,
}.items():
    register_corpus(_name, _row)

for _table in (FAMILIES, HEADS, TASKS, CORPORA, OPTIMIZERS, LOGGERS, FORMATS):
    _table.seal()
