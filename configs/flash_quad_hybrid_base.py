"""FLASH whose sixth layer is FLASH-Quad's, at 110M parameters: all pairs of tokens meet once.

python -m flash_lm.train --config=configs/flash_quad_hybrid_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    others = config.model.num_layers - 6
    config.model.pattern = ("flash",) * 5 + ("flash_quad",) + ("flash",) * others
    return config
