"""Mamba-2 beside configs/transformer_plus_plus_340m.py: 48 units with states of 128, as published.

python -m flash_lm.train --config=configs/mamba2_340m.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_plus_plus_340m


def get_config() -> ConfigDict:
    config = transformer_plus_plus_340m.get_config()
    config.model.update(family="mamba2", ssd={"state_dim": 128})
    return config
