"""Today's linear families beside Transformer++ at 1.3B parameters: 100 billion tokens.

    flash-lm train --config=configs/base_1300m.py:mamba2

24 layers of width 2048: the shape is that of the files named 1.3B in github.com/fla-org/flame; tokens and batch are
those remembered of "Gated Linear Attention Transformers …" (Yang et al. 2023, section 5.1).
"""

from ml_collections import ConfigDict

from flash_lm.configs import base_340m

PRESETS = {
    "transformer_plus_plus": {"model.family": "transformer_plus_plus"},
    # 48 gated attention units with chunks of 256.
    "flash": {"model.family": "flash", "model.gau.shared_dim": 128, "model.chunks.size": 256},
    # 48 units with states of 128, as published, and chunks as long.
    "mamba2": {
        "model.family": "mamba2",
        "model.ssd.state_dim": 128,
        "model.ssd.chunk_size": 128,
        "model.remat": "full",
    },
    # 21 layers with six heads, of 256 for the keys.
    "gated_deltanet": {
        "model.family": "gated_deltanet",
        "model.num_layers": 21,
        "model.num_heads": 6,
        "model.remat": "full",
    },
    # Four heads, as published. Its chunks are short, and so their states many.
    "gla": {"model.family": "gla", "model.num_heads": 4, "model.remat": "full"},
}


def get_config(name: str) -> ConfigDict:
    config = base_340m.get_config("transformer_plus_plus")
    config.model.update(model_dim=2048, num_heads=32, mlp_dim=5632, remat="products")
    config.data.tokens_per_batch = 2**21
    config.train.update(steps=47_700, warmup_steps=500)
    config.update_from_flattened_dict(PRESETS[name])
    return config
