"""The table of corpora."""

from flash_lm.config import DataConfig
from flash_lm.data.corpus import Corpus
from flash_lm.data.hugging_face import hugging_face
from flash_lm.data.text_files import stdlib, text_files

CORPORA = {"stdlib": stdlib, "text": text_files, "hf": hugging_face}


def load_corpus(config: DataConfig) -> Corpus:
    """The corpus that `config.data` names.

    Raises:
        InputError: it cannot be had, or there is no text in it.
    """
    return CORPORA[config.corpus](config)
