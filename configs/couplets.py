"""Couplets: given the first line, the model writes a second line of the same length. Each character is a token.

    flash-lm train --config=configs/couplets.py --config.data.path=$DATA/couplets --workdir=runs/couplets
    flash-lm evaluate --workdir=runs/couplets --split=test
    flash-lm generate --workdir=runs/couplets --prompt=春風得意馬蹄疾 --samples=16 --top_k=20

The model has four layers of width 128 and trains in 9 to 16 minutes on one core. Lines have up to 7 characters; longer
ones need a larger model.max_length. A sweep trains the linear, the softmax and the FLASH model. The report that this
follows used 8 layers of width 256, RAdam at 1e-4 and 20 epochs of 770,491 pairs.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base

FAMILIES = ("linear_transformer", "transformer", "flash")


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="linear_transformer", num_layers=4, model_dim=128, num_heads=8, max_length=16, init="lecun"
    )
    config.model.update(chunks={"size": 8}, linear={"chunk_size": 8})
    config.data.update(corpus="couplets", pack="examples", path="couplets", tokens_per_batch=128 * 16)
    config.train.update(
        steps=2000,
        learning_rate=2e-3,
        eval_every=250,
        checkpoint_every=250,
        clip=0.1,
    )
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {family: {"model.family": family} for family in FAMILIES}
