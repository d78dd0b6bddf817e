"""The Linear Transformer, 12 layers of 512, on the bytes of enwik8: 1.207 bits a character in the AFT paper's table.

flash-lm train --config=configs/linear_transformer_enwik8.py --config.data.path=enwik8
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_enwik8


def get_config() -> ConfigDict:
    config = transformer_enwik8.get_config()
    config.model.update(family="linear_transformer")
    return config
