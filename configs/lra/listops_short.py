"""ListOps of 50 to 200 symbols, for two cores. Its figures are not those of Long Range Arena.

    python -m flash_lm.train --config=configs/lra/listops_short.py --config.model.family=flash

The rule is that of the published task: `data/listops.py`. Chunks and windows have 32 tokens, far below a row.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = "classify"
    config.model.update(family="transformer", num_layers=2, model_dim=64, num_heads=4, max_length=200, init="lecun")
    config.model.update(
        gau={"shared_dim": 32}, chunks={"size": 32}, window={"size": 32}, linear={"chunk_size": 32}, scan_layers=False
    )
    config.data.update(corpus="listops", pack="examples", tokens_per_batch=32 * 200)
    config.data.listops.update(longer_than=50, shorter_than=200, train=96_000)
    config.train.update(steps=2000, learning_rate=1e-3, weight_decay=0.1, eval_every=250, checkpoint_every=500)
    return config
