"""Causal LM on Wiki-40B at 512 … 8192 tokens: perplexity per token against time per step (FLASH, section 4).

    flash-lm reproduce --table=wiki40b --out=studies/tables/results/wiki40b
    flash-lm reproduce --table=wiki40b --scale=small --corpus=stdlib --out=runs/wiki40b

The paper: Transformer++'s perplexity at all lengths, and training up to 4.9 times as fast.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base
from flash_lm.configs.tables import _by_length as by_length
from flash_lm.configs.tables._small_scale import shrink

TITLE = "FLASH: causal LM on Wiki-40B, 110M parameters"
METRIC = "perplexity"
FIGURES = {("transformer_plus_plus", 8192): 15.254, ("flash", 8192): 15.109}
get_runs, baseline = by_length.runs, by_length.baseline


def get_config(scale: str = "paper") -> ConfigDict:
    config = flash_base.get_config()
    return shrink(config) if scale == "small" else config


def get_figures(scale: str = "paper") -> dict[str, float]:
    return by_length.figures(FIGURES, scale)
