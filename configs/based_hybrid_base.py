"""Based between layers with a sliding window of 64 tokens, at 110M parameters: the state stays constant.

python -m flash_lm.train --config=configs/based_hybrid_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import based_base


def get_config() -> ConfigDict:
    config = based_base.get_config()
    config.model.pattern = ("longformer", "based")
    config.model.window.size = 64
    return config
