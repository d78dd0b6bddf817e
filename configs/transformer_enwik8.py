"""The Transformer, 12 layers of 512, on the bytes of enwik8: a baseline of "An Attention Free Transformer", section 5.

    flash-lm train --config=configs/transformer_enwik8.py --config.data.path=enwik8

The file comes from mattmahoney.net/dc/enwik8.zip; its first 90 % are for training, then 5 % and 5 %, cut at the end
of a line. 100 epochs of rows of 1024 bytes, 128 a batch. The table's bits a character are `bits_per_byte`:
1.137 for this one, 1.130 with --config.model.num_layers=24 --config.model.model_dim=256. The schedule and the batches'
order are ours.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="transformer",
        num_layers=12,
        model_dim=512,
        num_heads=8,
        max_length=1024,
        dropout=0.1,
        dtype="bfloat16",
        remat="products",
    )
    config.data.update(corpus="text", path="enwik8", tokenizer="bytes", tokens_per_batch=128 * 1024)
    config.train.update(
        steps=68_700,
        learning_rate=3e-3,
        warmup_steps=4_000,
        weight_decay=0.5,
        log_every=100,
        eval_every=2_000,
        eval_steps=100,
        checkpoint_every=2_000,
    )
    return config
