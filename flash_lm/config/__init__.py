"""The config schema: keys of an experiment, how they are declared, validated, filled in and overridden."""

from flash_lm.config import data, mesh, model, train  # noqa: F401 (they declare the groups, which sections join)
