"""Reformer's own pattern at 110M parameters: three layers with a sliding window to one with hashes.

python -m flash_lm.train --config=configs/reformer_hybrid_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import reformer_base


def get_config() -> ConfigDict:
    config = reformer_base.get_config()
    config.model.pattern = ("longformer", "longformer", "longformer", "reformer")
    return config
