"""Adaptive Span at 110M parameters: heads learn how far back they look; beside configs/flash_base.py.

python -m flash_lm.train --config=configs/adaptive_span_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.model.family = "adaptive_span"
    return config
