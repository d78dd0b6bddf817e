"""Transformer++ at the size that today's linear families are published at: 24 layers of width 1024, 15 billion tokens.

    python -m flash_lm.train --config=configs/transformer_plus_plus_340m.py

The shape is that of the files named 340M in github.com/fla-org/flame; tokens, batch and rates are those remembered of
"Gated Linear Attention Transformers …" (Yang et al. 2023, section 5.1). `*_340m.py` of other families start from here.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="transformer_plus_plus",
        num_layers=24,
        model_dim=1024,
        num_heads=16,
        mlp_dim=2816,
        max_length=2048,
        norm="rms",
        tie_embeddings=False,
        dtype="bfloat16",
        remat="products",
    )
    # A run reads a fortieth of it, so it is streamed, and never on disk as a whole.
    config.data.update(
        corpus="hf", name="cerebras/SlimPajama-627B", streaming=True, vocab_size=32000, tokens_per_batch=2**19
    )
    config.train.update(
        steps=28_600,
        learning_rate=3e-4,
        warmup_steps=1_000,
        clip=1.0,
        accumulate=16,
        log_every=100,
        eval_every=2_000,
        eval_steps=100,
        checkpoint_every=2_000,
    )
    return config
