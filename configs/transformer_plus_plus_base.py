"""Transformer++ at 110M parameters, the baseline with rotary positions and GLU; beside configs/flash_base.py.

flash-lm train --config=configs/transformer_plus_plus_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import base_110m


def get_config() -> ConfigDict:
    return base_110m.get_config("transformer_plus_plus")
