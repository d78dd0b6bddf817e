"""The size of the benchmarks: 8 layers of 256, 8192 words; large enough for matrix products to dominate on a CPU.

flash-lm train --config=configs/small.py --config.model.family=flash_quad
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.model.update(num_layers=8, model_dim=256, num_heads=8, gau={"shared_dim": 128}, vocab_size=8192)
    config.model.scan_layers = False  # a quarter faster on a CPU, which copies what a scan keeps for its derivative
    return config
