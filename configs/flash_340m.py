"""FLASH beside configs/transformer_plus_plus_340m.py: 48 gated attention units with chunks of 256.

python -m flash_lm.train --config=configs/flash_340m.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_plus_plus_340m


def get_config() -> ConfigDict:
    config = transformer_plus_plus_340m.get_config()
    config.model.update(family="flash", gau={"shared_dim": 128}, chunks={"size": 256})
    return config
