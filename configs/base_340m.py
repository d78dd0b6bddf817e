"""Today's linear families beside Transformer++, at the size that they are published at: 15 billion tokens.

    flash-lm train --config=configs/base_340m.py:mamba2

24 layers of width 1024: the shape is that of the files named 340M in github.com/fla-org/flame; tokens, batch and rates
are those remembered of "Gated Linear Attention Transformers …" (Yang et al. 2023, section 5.1).
"""

from ml_collections import ConfigDict

from flash_lm.configs import base

PRESETS = {
    # The first two fit a GPU of 80 GB without computing anything again (docs/scaling.md).
    "transformer_plus_plus": {"model.family": "transformer_plus_plus", "model.remat": "none"},
    # 48 gated attention units with chunks of 256.
    "flash": {"model.family": "flash", "model.gau.shared_dim": 128, "model.chunks.size": 256, "model.remat": "none"},
    # Heads of 256, as published, and an MLP of twice the width.
    "retnet": {"model.family": "retnet", "model.num_heads": 4, "model.mlp_dim": 2048},
    # 48 units with states of 128, as published, and chunks as long.
    "mamba2": {"model.family": "mamba2", "model.ssd.state_dim": 128, "model.ssd.chunk_size": 128},
    # 21 layers with three heads, of 256 for the keys.
    "gated_deltanet": {"model.family": "gated_deltanet", "model.num_layers": 21, "model.num_heads": 3},
    # Four heads, as published.
    "gla": {"model.family": "gla", "model.num_heads": 4},
    # Sixteen heads with queries and keys of 16, as published.
    "based": {"model.family": "based", "model.mlp_dim": 3328},
}


def get_config(name: str) -> ConfigDict:
    config = base.get_config()
    config.model.update(
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
    # A run reads a fortieth of it, so it is streamed and never stored.
    config.data.update(
        corpus="hf", name="cerebras/SlimPajama-627B", streaming=True, vocab_size=32000, tokens_per_batch=2**19
    )
    config.train.update(
        steps=28_600,
        learning_rate=3e-4,
        warmup_steps=1_000,
        clip=1.0,
        log_every=100,
        eval_every=2_000,
        eval_steps=100,
        checkpoint_every=2_000,
    )
    config.update_from_flattened_dict(PRESETS[name])
    return config
