"""ListOps of 50 to 200 symbols, for two cores. Its figures are not those of Long Range Arena.

    python -m flash_lm.train --config=studies/lra/configs/listops_short.py --config.model.family=flash
    python -m flash_lm.sweep --config=studies/lra/configs/listops_short.py --split=test

The sweep trains each family from scratch, and with masked pretraining on its training sequences. The rule is that of
the published task (`data/synthetic/listops.py`).
"""

from ml_collections import ConfigDict

from studies.lra import models


def get_config() -> ConfigDict:
    config = models.small_model(length=200, rows=32)
    config.data.update(corpus="listops", pack="examples")
    config.data.listops.update(longer_than=50, shorter_than=200)
    config.train.steps = 1000
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return models.runs(masked=0.1)
