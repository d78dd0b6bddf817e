"""A hybrid at 110M parameters: of each four layers three are FLASH's, and one has softmax attention and a GLU.

python -m flash_lm.train --config=configs/flash_hybrid_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.model.pattern = ("flash", "flash", "flash", "transformer_plus_plus")
    return config
