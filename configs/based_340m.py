"""Based beside configs/transformer_plus_plus_340m.py: sixteen heads with queries and keys of 16, as published.

python -m flash_lm.train --config=configs/based_340m.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_plus_plus_340m


def get_config() -> ConfigDict:
    config = transformer_plus_plus_340m.get_config()
    config.model.update(family="based", mlp_dim=3328)
    return config
