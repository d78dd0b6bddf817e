"""The copy task of "Transformers are RNNs": rows of 128, ten symbols, the second half is the first one again.

    python -m flash_lm.train --config=configs/copy.py --config.model.family=linear_transformer
    python -m flash_lm.sweep --config=configs/copy.py    # all five families, in runs/copy_sweep

The paper's: 4 layers, 8 heads, batch 64, RAdam 1e-3, and 1e-4 after 3000 updates. Here a width of 128, and the rate
falls after 1500 of 2000 updates, for two cores; not run to its end yet.
"""

from ml_collections import ConfigDict

from configs import base

FAMILIES = ("transformer", "linear_transformer", "flash", "aft_local", "aft_simple")


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="linear_transformer", num_layers=4, model_dim=128, num_heads=8, max_length=128, init="lecun"
    )
    config.model.chunk_size = 32
    config.data.update(corpus="copy", pack="examples", tokens_per_batch=64 * 128)
    config.train.update(
        steps=2000,
        optimizer="radam",
        learning_rate=1e-3,
        schedule="step",
        boundaries=(1500,),
        warmup_steps=0,
        weight_decay=0.0,
        eval_every=50,
        eval_steps=4,
        checkpoint_every=500,
    )
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {family: {"model.family": family} for family in FAMILIES}
