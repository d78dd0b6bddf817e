"""Which divisor N the unsoftmaxed attentions should have: the count of visible keys, a constant, or the row's length.

    STUDY="python -m flash_lm.sweep --config=configs/studies/divisor.py --split=test --config.data.corpus=hf"
    $STUDY --workdir=runs/divisor/rows_of_512 --lengths=512,2048,8192 --config.data.path=$DATA/wiki
    $STUDY --workdir=runs/divisor/rows_of_2048 --lengths=2048,8192 --config.data.path=$DATA/wiki \
        --config.data.length=2048
    $STUDY --workdir=runs/divisor/documents --lengths=512,2048 --config.data.path=$DATA/wikitext2 \
        --config.data.pack=documents

Written before the first run: the constant becomes the default of causal models only if it is no worse than the count
(perplexity on the test split at most 1.02 times the count's) with every seed, for FLASH and FLASH-Quad, in all three
settings, at the length of training and at four times it, and if text of sixteen times the length of training does not
fall apart where the count's does not. One failure keeps the count. The constant is data.length for all pairs and for
the part over chunks, and the chunk's length inside it. `length` is the same model as the constant until it is scored at
another length.
"""

from ml_collections import ConfigDict

from configs import claims

FAMILIES = ("flash", "flash_quad")


def get_config() -> ConfigDict:
    config = claims.get_config()
    config.data.length = 512
    config.model.max_length = 8192  # what is scored; positions have no table
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    kinds = {"count": "count", "constant": str(config.data.length)}
    if (config.data.length, config.data.pack) == (512, "stream"):  # once is enough: it trains as the constant does
        kinds["length"] = "length"
    return {
        f"{family}_{kind}_seed_{seed}": {"model.family": family, "model.normalizer": normalizer, "seed": seed}
        for seed in claims.SEEDS
        for kind, normalizer in kinds.items()
        for family in FAMILIES
    }
