"""RetNet beside configs/transformer_plus_plus_340m.py: heads of 256, as published, and an MLP of twice the width.

python -m flash_lm.train --config=configs/retnet_340m.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_plus_plus_340m


def get_config() -> ConfigDict:
    config = transformer_plus_plus_340m.get_config()
    config.model.update(family="retnet", num_heads=4, mlp_dim=2048)
    return config
