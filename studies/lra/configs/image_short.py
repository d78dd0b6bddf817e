"""MNIST, 784 pixels per sequence, for two cores. Its figures are not those of Long Range Arena, which has CIFAR-10.

    python -m flash_lm.train --config=studies/lra/configs/image_short.py --config.data.path=$DATA/mnist
    python -m flash_lm.sweep --config=studies/lra/configs/image_short.py --config.data.path=$DATA/mnist --split=test

The sweep trains each family from scratch, and with masked pretraining on its training sequences.
"""

from ml_collections import ConfigDict

from studies.lra import models


def get_config() -> ConfigDict:
    config = models.small_model(length=785, rows=8)
    config.data.update(corpus="images", pack="examples", path="mnist")
    config.train.update(steps=400, eval_every=0, eval_steps=64)
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return models.runs(masked=0.5)
