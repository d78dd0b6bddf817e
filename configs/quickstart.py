"""A small model on the interpreter's own sources: about a minute on a laptop.

python -m flash_lm.train --config=configs/quickstart.py --config.model.family=flash_quad
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    return config
