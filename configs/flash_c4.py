"""FLASH at 110M parameters, masked LM on C4: "Transformer Quality in Linear Time", section 4.

    flash-lm train --config=configs/flash_c4.py

C4 has no test split and 300 GB of text: it is streamed, and the first documents are held out as the test split. The
paper's norm for masked models, ScaleNorm, follows from the task.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.task = "masked_lm"
    config.model.remat = "products"
    config.data.update(name="allenai/c4", config="en", streaming=True)
    return config
