"""DeltaNet at 110M parameters: Gated DeltaNet whose sums do not decay.

python -m flash_lm.train --config=configs/deltanet_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import gated_deltanet_base


def get_config() -> ConfigDict:
    config = gated_deltanet_base.get_config()
    config.model.delta.decay = False
    return config
