"""The copy task of "Transformers are RNNs": rows of 128, ten symbols, the second half is the first one again.

    flash-lm train --config=configs/copy.py --config.model.family=linear_transformer
    flash-lm sweep --config=configs/copy.py    # all five families, in runs/copy_sweep

The paper's: 4 layers, 8 heads, batch 64, RAdam 1e-3, and 1e-4 after 3000 updates (--config.data.tokens_per_batch=8192
--config.train.learning_rate=1e-3 "--config.train.boundaries=(3000,)" --config.train.steps=6000). Here, for two cores, a
width of 64, batch 16, and 1e-2, and 1e-3 after 1500 of 2000: 3 to 10 minutes a model on one core. The window of
AFT-local reaches the symbol that is to be copied.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base

FAMILIES = ("transformer", "linear_transformer", "flash", "aft_local", "aft_simple")


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="linear_transformer", num_layers=4, model_dim=64, num_heads=8, max_length=128, init="lecun"
    )
    config.model.update(chunks={"size": 32}, linear={"chunk_size": 32}, aft={"window": 64})
    config.data.update(corpus="copy", pack="examples", tokens_per_batch=16 * 128)
    config.train.update(
        steps=2000,
        optimizer="radam",
        learning_rate=1e-2,
        schedule="step",
        boundaries=(1500,),
        warmup_steps=0,
        weight_decay=0.0,
        eval_every=50,
        eval_steps=16,
        checkpoint_every=500,
    )
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {family: {"model.family": family} for family in FAMILIES}
