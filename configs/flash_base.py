"""FLASH at 110M parameters, causal LM on Wiki-40B: "Transformer Quality in Linear Time", section 4.

    flash-lm train --config=configs/flash_base.py

Without a network, on what every machine has: --config.data.corpus=stdlib. The paper trains for 125K steps of 2^18
tokens; AdamW's settings and the clipping are those remembered of its appendix, but for ε, which is 1e-8 and not 1e-6:
other families start from this file too, and AFT's position bias would not move.
The other families of the paper's tables start from this file, so that all see the same tokens.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="flash",
        num_layers=12,  # 12 attention + feed-forward layers, or 24 GAUs
        model_dim=768,
        num_heads=12,
        gau={"shared_dim": 128},
        chunks={"size": 256},
        linear={"chunk_size": 256},
        max_length=1024,
        dtype="bfloat16",
        remat="none",  # a microbatch fits a GPU of 80 GB, see docs/scaling.md
    )
    config.data.update(corpus="hf", name="google/wiki40b", config="en", vocab_size=32000, tokens_per_batch=2**18)
    config.train.update(
        steps=125_000,
        learning_rate=7e-4,
        warmup_steps=10_000,
        clip=0.1,
        log_every=100,
        eval_every=5_000,
        eval_steps=100,
        checkpoint_every=5_000,
    )
    return config
