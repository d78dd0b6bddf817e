"""Lite Transformer at 110M parameters; beside configs/flash_base.py.

python -m flash_lm.train --config=configs/lite_transformer_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.model.update(family="lite_transformer")
    return config
