"""The keys of an experiment: how they are declared, checked, filled in and overridden."""

from flash_lm.config import data, mesh, model, train  # noqa: F401 (they declare the groups, which sections join)
