"""AFT-local, 12 layers of 512, window 32, on the bytes of enwik8: "An Attention Free Transformer", section 5.2.

The table has 1.180 bits a character, and 1.154 with --config.model.num_layers=24 --config.model.model_dim=256.

    flash-lm train --config=configs/aft_local_enwik8.py --config.data.path=enwik8
"""

from ml_collections import ConfigDict

from flash_lm.configs import transformer_enwik8


def get_config() -> ConfigDict:
    config = transformer_enwik8.get_config()
    config.model.update(family="aft_local", aft={"window": 32, "bias_dim": 256})
    return config
