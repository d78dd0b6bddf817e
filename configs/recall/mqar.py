"""Associative recall (MQAR) for a few minutes on one core: 4 and 8 pairs in sequences of 64, 256 words.

python -m flash_lm.train --config=configs/recall/mqar.py --workdir=runs/mqar --config.model.family=based
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="transformer_plus_plus", num_layers=2, model_dim=64, num_heads=2, max_length=64, short_convolution=3
    )
    config.model.update(gau={"shared_dim": 32}, chunks={"size": 16}, window={"size": 16}, linear={"chunk_size": 16})
    config.data.update(corpus="mqar", pack="examples", tokens_per_batch=64 * 64)
    parts = ((64, 4, 1 << 17), (64, 8, 1 << 17))
    config.data.mqar.update(
        words=256,
        train=parts,
        validation=tuple((length, pairs, 128) for length, pairs, _ in parts),
        test=tuple((length, pairs, 256) for length, pairs, _ in parts),
        random_filler=False,
    )
    config.train.update(
        steps=1500,
        learning_rate=1e-2,
        schedule="cosine",
        weight_decay=0.1,
        eval_every=50,
        stop_accuracy=0.99,
        checkpoint_every=0,
    )
    return config
