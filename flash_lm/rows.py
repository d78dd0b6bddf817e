"""The package's own rows: imports the modules that add them to the tables, then seals the tables.

It imports JAX and Flax, so a table imports it only when a row is first read.
"""

from flash_lm.data import corpora, made_corpora, tasks  # noqa: F401 (imported for their rows, as all of these)
from flash_lm.families import table  # noqa: F401
from flash_lm.models import classifier, heads  # noqa: F401
from flash_lm.tables import CORPORA, FAMILIES, HEADS, OPTIMIZERS, TASKS
from flash_lm.training import optimizer  # noqa: F401

for _table in (FAMILIES, HEADS, TASKS, CORPORA, OPTIMIZERS):
    _table.seal()
