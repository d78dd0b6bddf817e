"""Causal LM on PG-19 at 512 … 8192 tokens: perplexity per word against time per step (FLASH, section 4).

    flash-lm reproduce --table=pg19 --out=studies/tables/results/pg19
    flash-lm reproduce --table=pg19 --scale=small --corpus='books/*.txt' --out=runs/pg19

The paper: Transformer++'s perplexity at all lengths, and training up to 12.1 times as fast.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_pg19
from flash_lm.configs.tables import _by_length as by_length
from flash_lm.configs.tables._small_scale import shrink

TITLE = "FLASH: causal LM on PG-19, 110M parameters"
METRIC = "word_perplexity"
get_runs, baseline = by_length.runs, by_length.baseline


def get_config(scale: str = "paper") -> ConfigDict:
    config = flash_pg19.get_config()
    return shrink(config) if scale == "small" else config


def get_figures(scale: str = "paper") -> dict[str, float]:
    return {}
