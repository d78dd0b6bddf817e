"""The rows of the package: the modules that add them to the tables, which are sealed then.

It imports JAX and Flax. So a table imports it when somebody reads a row, and nothing else does before.
"""

from flash_lm.data import corpora, tasks  # noqa: F401 (as all of these: its rows join the table)
from flash_lm.models import families, heads  # noqa: F401
from flash_lm.tables import CORPORA, FAMILIES, HEADS, OPTIMIZERS, TASKS
from flash_lm.training import optimizer  # noqa: F401

for _table in (FAMILIES, HEADS, TASKS, CORPORA, OPTIMIZERS):
    _table.seal()
