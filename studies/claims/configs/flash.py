"""Two choices that FLASH leaves open: the divisor N of attention without softmax, and the encoding of positions.

    STUDY="python -m flash_lm.sweep --config=studies/claims/configs/flash.py --split=test --config.data.corpus=hf"
    $STUDY --workdir=runs/flash/rows_of_512 --lengths=512,2048,8192 --config.data.path=$DATA/wiki
    $STUDY --workdir=runs/flash/rows_of_2048 --lengths=2048,8192 --config.data.path=$DATA/wiki \
        --config.data.length=2048
    $STUDY --workdir=runs/flash/documents --lengths=512,2048 --config.data.path=$DATA/wikitext2 \
        --config.data.pack=documents

The criteria for the divisor were set before the first run. The constant becomes the default of causal models only if
it is no worse than the count (perplexity on the test split at most 1.02 times the count's) with every seed, for FLASH
and FLASH-Quad, in all three settings, at the training length and at four times that length. In addition, it must not
break down on text of sixteen times the training length where the count does not. A single failure keeps the count. The
constant is data.length for all pairs and for the part over chunks, and the chunk's length inside a chunk. `length` is
the same model as the constant until it is scored at another length.

The criterion for the positions: one encoding is better than the other if its perplexity on the test split is below
1 / 1.02 times the other's with every seed.
"""

from ml_collections import ConfigDict

from studies.claims.configs import books

FAMILIES = ("flash", "flash_quad")


def get_config() -> ConfigDict:
    config = books.get_config()
    config.data.length = 512
    config.model.max_length = 8192  # longest scored length; these positions have no table
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    count, constant = {"model.normalizer": "count"}, {"model.normalizer": str(config.data.length)}
    runs = _repeat_over_seeds(count=count, constant=constant)
    if (config.data.length, config.data.pack) == (512, "stream"):
        rotary = {"model.absolute_positions": "none", "model.gau.relative_bias": "none"}
        runs |= _repeat_over_seeds(rotary=count | rotary) | _repeat_over_seeds(length={"model.normalizer": "length"})
    return runs


def _repeat_over_seeds(**kinds: dict) -> dict[str, dict]:
    return {
        f"{family}_{kind}_seed_{seed}": {"model.family": family, **changes, "seed": seed}
        for seed in books.SEEDS
        for kind, changes in kinds.items()
        for family in FAMILIES
    }
