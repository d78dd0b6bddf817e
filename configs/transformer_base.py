"""Transformer at 110M parameters, the baseline with learned positions; beside configs/flash_base.py.

flash-lm train --config=configs/transformer_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import base_110m


def get_config() -> ConfigDict:
    return base_110m.get_config("transformer")
