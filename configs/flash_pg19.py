"""FLASH at 110M parameters, causal LM on PG-19: "Transformer Quality in Linear Time", section 4.

    flash-lm train --config=configs/flash_pg19.py --config.model.max_length=8192

The paper gives perplexity a word, at lengths of 512 to 8192: `flash_lm.evaluate` has it as word_perplexity.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.data.update(name="emozilla/pg19", config=None)
    return config
