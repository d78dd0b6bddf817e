"""MC-TFM++ at 110M parameters, mixed chunks in a Transformer++; beside configs/flash_base.py.

flash-lm train --config=configs/mc_tfm_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import base_110m


def get_config() -> ConfigDict:
    return base_110m.get_config("mc_tfm")
