"""IMDb's reviews as sequences of 1024 bytes, for two cores. Its figures are not those of Long Range Arena.

    python -m flash_lm.train --config=studies/lra/configs/text_short.py --config.data.path=$DATA/imdb
    python -m flash_lm.sweep --config=studies/lra/configs/text_short.py --config.data.path=$DATA/imdb --split=test

The sweep trains each family from scratch, and with masked pretraining on its training sequences.
"""

from ml_collections import ConfigDict

from studies.lra import models


def get_config() -> ConfigDict:
    config = models.small_model(length=1024, rows=8)
    config.data.update(corpus="hf", path="imdb", label_column="label", tokenizer="bytes")
    config.train.update(steps=400, eval_every=0, eval_steps=64)
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return models.runs(masked=0.15)
