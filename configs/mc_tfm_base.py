"""MC-TFM++ at 110M parameters, mixed chunks in a Transformer++; beside configs/flash_base.py.

python -m flash_lm.train --config=configs/mc_tfm_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.model.family = "mc_tfm"
    return config
