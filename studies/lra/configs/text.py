"""The text task of Long Range Arena: IMDb's reviews as 4096 bytes, 20,000 steps of 32 sequences; for a GPU.

    python -m flash_lm.train --config=studies/lra/configs/text.py --config.data.path=$DATA/imdb

`data.path` has train and test as parquet or JSON lines, with columns text and label. The published code tests on the
split that it also validates on. Here validation is held out of training. The published sequences have 1000 bytes in the
repository and 4096 in later papers. The published model has a hidden layer before the labels.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = "classify"
    config.model.update(
        family="transformer", num_layers=4, model_dim=256, num_heads=4, mlp_dim=1024, max_length=4096, dropout=0.1
    )
    config.model.classes.pool = "first"
    config.data.update(corpus="hf", path="imdb", label_column="label", tokenizer="bytes", tokens_per_batch=32 * 4096)
    config.train.update(
        steps=20_000, warmup_steps=8000, learning_rate=1e-3, weight_decay=0.1, eval_every=1000, checkpoint_every=1000
    )
    return config
