"""The divisor of FLASH's appendix, which divides scores, against the former default, which divides weights.

    STUDY="python -m flash_lm.sweep --config=studies/claims/configs/divisor.py --split=test --config.data.corpus=hf"
    $STUDY --workdir=runs/divisor/rows_of_512 --lengths=512,2048,8192 --config.data.path=$DATA/wiki
    $STUDY --workdir=runs/divisor/rows_of_2048 --lengths=2048,8192 --config.data.path=$DATA/wiki \
        --config.data.length=2048
    $STUDY --workdir=runs/divisor/documents --lengths=512,2048 --config.data.path=$DATA/wikitext2 \
        --config.data.pack=documents
    $STUDY --workdir=runs/divisor/masked --lengths=512 --config.data.path=$DATA/wiki --config.task=masked_lm

The former default is the number of visible keys (count) in causal models, and `data.length` (constant) in masked ones.
When the runs were made, `divides=scores` was `normalizer=paper_512` (2048 at sequence length 2048), and computed the
same.

Criteria, set before the first run, as in flash.py: `scores` becomes the default of causal models only if it is no
worse than the count (perplexity on the test split at most 1.02 times the count's) with every seed, for FLASH and
FLASH-Quad, in the first three settings, at the training length and at four times that length, and if at sixteen times
it does not break down where the count does not (at most 1.02 times the count's, too). It becomes that of masked models
only if it is no worse than the constant with every seed in the last setting. A failure of FLASH-Quad alone keeps its
default alone. It was better for FLASH with one seed of larger models (studies/quality), so it is tried here.
"""

from ml_collections import ConfigDict

from studies.claims.configs import books, flash


def get_config() -> ConfigDict:
    config = flash.get_config()
    config.model.update(residual_init=None, scale_init="normal")  # as by default today
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    usual = "constant" if config.task == "masked_lm" else "count"
    return {
        f"{family}_{kind}_seed_{seed}": {"model.family": family, "model.divides": divides, "seed": seed}
        for seed in books.SEEDS
        for family in flash.FAMILIES
        for kind, divides in ((usual, "weights"), ("scores", "scores"))
    }
