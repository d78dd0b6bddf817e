"""ListOps of Long Range Arena at its published size: 500 to 2000 symbols, 5000 steps of 32 sequences; for a GPU.

    python -m flash_lm.train --config=studies/lra/configs/listops.py --config.model.family=flash

Width 512, 8 heads, 4 layers with feed-forward layers of 1024, as in the published code, and the features of the first
token. The published schedule, the inverse square root of the step from 0.05, and the hidden layer before the labels are
left out.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = "classify"
    config.model.update(
        family="transformer", num_layers=4, model_dim=512, num_heads=8, mlp_dim=1024, max_length=2000, dropout=0.1
    )
    config.model.classes.pool = "first"
    config.data.update(corpus="listops", pack="examples", tokens_per_batch=32 * 2000)
    config.train.update(
        steps=5000, warmup_steps=1000, learning_rate=1e-3, weight_decay=0.1, eval_every=500, checkpoint_every=500
    )
    return config
