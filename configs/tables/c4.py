"""Masked LM on C4 at 512 … 8192 tokens: perplexity of masked tokens against time per step (FLASH, section 4).

    flash-lm reproduce --table=c4 --out=studies/tables/results/c4
    flash-lm reproduce --table=c4 --scale=small --corpus=stdlib --out=runs/c4

The paper: Transformer++'s perplexity at all lengths, and training up to 4.8 times as fast.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_c4
from flash_lm.configs.tables import _by_length as by_length
from flash_lm.configs.tables._small_scale import shrink

TITLE = "FLASH: masked LM on C4, 110M parameters"
METRIC = "perplexity"
FIGURES = {("transformer_plus_plus", 8192): 3.933, ("flash", 8192): 3.897}
get_runs, baseline = by_length.runs, by_length.baseline


def get_config(scale: str = "paper") -> ConfigDict:
    config = flash_c4.get_config()
    return shrink(config) if scale == "small" else config


def get_figures(scale: str = "paper") -> dict[str, float]:
    return by_length.figures(FIGURES, scale)
