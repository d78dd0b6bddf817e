"""The schema with its defaults: docs/keys.md lists every key with its unit, and who reads it.

Every other config starts from it and states what differs. An open key (a placeholder) is filled in by the place that
docs/keys.md names, so `--config.model.family=flash_quad` alone turns any config into another family of the same size.
"""

from ml_collections import ConfigDict

from flash_lm.config.experiment import default_config


def get_config() -> ConfigDict:
    return default_config()
