"""How FLASH and FLASH-Quad should be told positions: the paper's three kinds, or rotary ones alone.

    python -m flash_lm.sweep --config=configs/studies/positions.py --split=test --lengths=512,2048,8192 \
        --workdir=runs/positions --config.data.corpus=hf --config.data.path=$DATA/wiki

Written before the first run: one way is better than another when its perplexity on the test split is below 0.98 times
the other's with every seed.
"""

from ml_collections import ConfigDict

from configs import claims
from configs.studies import divisor

KINDS = {
    "three": {},
    "rotary": {"model.absolute_positions": "none", "model.relative_bias": "none"},
    "without_sinusoid": {"model.absolute_positions": "none"},
    "without_bias": {"model.relative_bias": "none"},
}


def get_config() -> ConfigDict:
    return divisor.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {
        f"{family}_{kind}_seed_{seed}": {"model.family": family, **changes, "seed": seed}
        for seed in claims.SEEDS
        for kind, changes in KINDS.items()
        for family in divisor.FAMILIES
    }
