"""Every family at one size on one corpus: perplexity and step time. Not a table of a paper.

    flash-lm reproduce --table=families --out=studies/families/results/base_110m
    flash-lm reproduce --table=families --scale=small --corpus=$DATA/books --split=validation \
        --out=studies/families/results/causal

Small: 1.3M parameters, 750 steps of 2048 tokens, one seed; three to fifteen minutes per run.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base_110m, flash_base, quickstart
from flash_lm.families.family import families_with_form

TITLE = "Every family at one size"
METRIC = "perplexity"
BASELINE = "transformer_plus_plus"


def get_config(scale: str = "paper") -> ConfigDict:
    if scale == "paper":
        return flash_base.get_config()
    config = quickstart.get_config()
    config.data.vocab_size = 4096
    config.train.update(steps=750, warmup_steps=75, eval_every=75, eval_steps=40, checkpoint_every=250)
    return config


def get_runs(scale: str = "paper") -> dict[str, dict]:
    others = [family for family in families_with_form(causal=True) if family != BASELINE]
    runs = {family: {"model.family": family} for family in (BASELINE, *others)}  # the first is the baseline
    if scale == "paper":
        for family, keys in runs.items():
            keys["model.remat"] = base_110m.get_config(family).model.remat
    return runs


def get_figures(scale: str = "paper") -> dict[str, float]:
    return {}
