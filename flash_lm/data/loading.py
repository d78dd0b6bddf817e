"""The corpus of a config, ready to be cut into rows: text as tokens, or examples."""

from flash_lm.config import EXAMPLES, DataConfig
from flash_lm.data.copying import copying
from flash_lm.data.couplets import couplets
from flash_lm.data.examples import ExampleCorpus, ExampleRows
from flash_lm.data.images import images
from flash_lm.data.packing import PACKERS
from flash_lm.data.token_cache import TokenizedCorpus, load_tokenized

Splits = TokenizedCorpus | ExampleCorpus

_EXAMPLES = {"copy": lambda config: copying(), "couplets": couplets, "images": images}
assert set(_EXAMPLES) == set(EXAMPLES)

# data.pack -> rows of a split
ROWS = PACKERS | {"examples": ExampleRows}


def load_splits(config: DataConfig) -> Splits:
    """All splits of the corpus that `config` names, with their tokenizer.

    Raises:
        InputError: it cannot be had, or there is nothing in it.
    """
    return _EXAMPLES.get(config.corpus, load_tokenized)(config)
