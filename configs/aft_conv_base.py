"""AFT-conv at 110M parameters; beside configs/flash_base.py.

python -m flash_lm.train --config=configs/aft_conv_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.model.update(family="aft_conv", aft={"window": 32})
    return config
