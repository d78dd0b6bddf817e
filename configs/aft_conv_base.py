"""AFT-conv at 110M parameters; beside configs/flash_base.py.

flash-lm train --config=configs/aft_conv_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import base_110m


def get_config() -> ConfigDict:
    return base_110m.get_config("aft_conv")
