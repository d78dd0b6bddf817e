"""Transformer++ at 110M parameters, the baseline with rotary positions and GLU; beside configs/flash_base.py.

python -m flash_lm.train --config=configs/transformer_plus_plus_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.model.family = "transformer_plus_plus"
    return config
