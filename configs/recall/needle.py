"""A needle in a haystack of bytes, sequences of 512: the end of a text asks for a code from inside it.

python -m flash_lm.train --config=configs/recall/needle.py --config.model.family=flash
python -m flash_lm.evaluate --workdir=runs/needle --slices=parts    # by depth
python -m flash_lm.evaluate --workdir=runs/needle --carry --config.data.needle.length=4096
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(family="flash", num_layers=2, model_dim=128, num_heads=4, max_length=512, init="lecun")
    config.model.update(gau={"shared_dim": 64}, chunks={"size": 64}, linear={"chunk_size": 64})
    config.data.update(corpus="needle", pack="examples", tokens_per_batch=32 * 512)
    config.train.update(steps=2000, eval_every=200, checkpoint_every=500, stop_accuracy=0.99)
    return config
