"""The corpus of a config, ready to be cut into rows: text as tokens, or examples."""

from flash_lm.config import DataConfig
from flash_lm.data.examples import ExampleCorpus, ExampleRows
from flash_lm.data.packing import PACKERS
from flash_lm.data.token_cache import OwnCorpus, TokenizedCorpus, load_tokenized
from flash_lm.tables import CORPORA

Splits = TokenizedCorpus | ExampleCorpus

# data.pack -> rows of a split
ROWS = PACKERS | {"examples": ExampleRows}


def load_splits(config: DataConfig, own: OwnCorpus | None = None, *, whole: bool = False) -> Splits:
    """All splits of the corpus that `config` names, with their tokenizer.

    Args:
        config: names it.
        own: what a run knows of its own; None: there is no run.
        whole: of text, all of it as one split of the name WHOLE, and no other.

    Raises:
        InputError: it cannot be had, or there is nothing in it.
    """
    kind = CORPORA[config.corpus]
    if kind.examples:
        return kind.load(config, own, *(config[section] for section in kind.sections))
    return load_tokenized(config, own, whole=whole)
