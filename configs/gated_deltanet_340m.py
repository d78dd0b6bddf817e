"""Gated DeltaNet beside configs/transformer_plus_plus_340m.py: 21 layers with three heads, of 256 for the keys.

python -m flash_lm.train --config=configs/gated_deltanet_340m.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_plus_plus_340m


def get_config() -> ConfigDict:
    config = transformer_plus_plus_340m.get_config()
    config.model.update(family="gated_deltanet", num_layers=21, num_heads=3)
    return config
