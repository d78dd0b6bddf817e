"""LogSparse at 110M parameters: near tokens, and distances that double; beside configs/flash_base.py.

python -m flash_lm.train --config=configs/log_sparse_base.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.model.family = "log_sparse"
    return config
