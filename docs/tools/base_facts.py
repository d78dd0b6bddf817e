"""The facts about each family that README's table and the site show, all at the size of configs/flash_base.py."""

import re
from typing import Any

from flash_lm.config.registry import FAMILIES
from flash_lm.configs import flash_base
from flash_lm.models.facts import Facts, facts

# Tokens: a short and a long text to decode, and a short and a long row to train on.
CAPACITIES, LENGTHS = (1024, 65536), (512, 8192)


def base_facts(family: str) -> Facts:
    """The facts of a row of the table, with decode states for CAPACITIES and FLOPs for LENGTHS."""
    config: Any = flash_base.get_config()
    config.model.vocab_size = config.data.vocab_size
    return facts(family, config.model, CAPACITIES, LENGTHS)


def paper_link(family: str) -> str:
    """Authors and year of a family's paper, in Markdown; a link if it is on arXiv."""
    return re.sub(r"(.*), arXiv:(\S+)", r"[\1](https://arxiv.org/abs/\2)", FAMILIES[family].paper)
