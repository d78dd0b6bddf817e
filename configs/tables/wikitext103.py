"""WikiText-103 at 43M parameters, rows of 512, beside the figures of table 1 of the TNL paper (about 44M).

    python scripts/reproduce.py --table=wikitext103 --out=results/wikitext103

Vocabulary and schedule are ours, so perplexity a word is the one to compare.
"""

from ml_collections import ConfigDict

from configs import flash_wikitext103
from configs.tables._small_scale import shrink

TITLE = "WikiText-103, 43M parameters"
METRIC = "word_perplexity"
# family -> test perplexity
FIGURES = {"transformer": 24.78, "flash": 26.70, "linear_transformer": 28.05, "performer": 63.16}


def get_config(scale: str = "paper") -> ConfigDict:
    config = flash_wikitext103.get_config()
    return shrink(config) if scale == "small" else config


def get_runs(scale: str = "paper") -> dict[str, dict]:
    return {family: {"model.family": family} for family in FIGURES}


def get_figures(scale: str = "paper") -> dict[str, float]:
    return FIGURES
