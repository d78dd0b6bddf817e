"""In-context bigrams: sequences of 256 out of 16 symbols, each with a different table of transitions.

python -m flash_lm.train --config=configs/recall/bigrams.py --config.model.family=flash
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(family="flash", num_layers=2, model_dim=64, num_heads=2, max_length=256, init="lecun")
    config.model.update(gau={"shared_dim": 32}, chunks={"size": 32}, linear={"chunk_size": 32})
    config.data.update(corpus="bigrams", pack="examples", tokens_per_batch=32 * 256)
    config.train.update(steps=1000, eval_every=100, checkpoint_every=500)
    return config
