"""FLASH-Quad at 110M parameters, GAUs over all pairs of tokens; beside configs/flash_base.py.

flash-lm train --config=configs/flash_quad_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import base_110m


def get_config() -> ConfigDict:
    return base_110m.get_config("flash_quad")
