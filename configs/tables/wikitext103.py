"""WikiText-103 at 43M parameters, length 512, compared with the figures of table 1 of the TNL paper (about 44M).

    flash-lm reproduce --table=wikitext103 --out=studies/tables/results/wikitext103

Vocabulary and schedule are ours, so compare perplexity per word, with line ends counted as words, as in the published
figures. The test split has 241,211 words separated by white space, and 245,569 with line ends. We count 244,102 of
these, since blank lines are left out of the text and of the count. As for the published figures, the corpus is the
version whose rare words are <unk>. The raw version spells them out, which costs more tokens per word. Its perplexity
per word is therefore higher and not comparable with these figures.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_wikitext103
from flash_lm.configs.tables._small_scale import shrink

TITLE = "WikiText-103, 43M parameters"
METRIC = "word_perplexity_eos"
# family -> test perplexity
FIGURES = {"transformer": 24.78, "flash": 26.70, "linear_transformer": 28.05, "performer": 63.16}


def get_config(scale: str = "paper") -> ConfigDict:
    config = flash_wikitext103.get_config()
    return shrink(config) if scale == "small" else config


def get_runs(scale: str = "paper") -> dict[str, dict]:
    return {family: {"model.family": family} for family in FIGURES}


def get_figures(scale: str = "paper") -> dict[str, float]:
    return FIGURES
