"""Gated DeltaNet with softmax in one layer of four, at 110M parameters: what must be found exactly has a place.

python -m flash_lm.train --config=configs/gated_deltanet_hybrid_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import gated_deltanet_base


def get_config() -> ConfigDict:
    config = gated_deltanet_base.get_config()
    config.model.pattern = ("gated_deltanet", "gated_deltanet", "gated_deltanet", "transformer_plus_plus")
    return config
