"""The small model of quickstart.py on a mixture: seven rows of books for three of Wikipedia, whatever their sizes.

    flash-lm train --config=configs/mixture.py "--config.data.mixture=(('books/', 0.7), ('wiki/', 0.3))"

Each place is a folder, file or glob, or a data set on the hub.
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.data.update(corpus="hf", mixture=(("books", 0.7), ("wiki", 0.3)))
    return config
