"""FLASH at 40M parameters on the bytes of enwik8; beside configs/transformer_enwik8.py.

flash-lm train --config=configs/flash_enwik8.py --config.data.path=enwik8
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_enwik8


def get_config() -> ConfigDict:
    config = transformer_enwik8.get_config()
    config.model.update(family="flash", gau={"shared_dim": 128})
    return config
