"""GLA beside configs/transformer_plus_plus_340m.py: four heads, as published.

python -m flash_lm.train --config=configs/gla_340m.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_plus_plus_340m


def get_config() -> ConfigDict:
    config = transformer_plus_plus_340m.get_config()
    config.model.update(family="gla", num_heads=4)
    return config
