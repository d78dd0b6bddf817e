"""Nyströmformer at 110M parameters: softmax attention from 64 landmarks, masked; beside configs/flash_base.py.

python -m flash_lm.train --config=configs/nystromformer_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.task = "masked_lm"
    config.model.family = "nystromformer"
    return config
