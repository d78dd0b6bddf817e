"""What a run will know of its corpus, as far as it is known before the corpus is read."""

from typing import NamedTuple

from flash_lm.config.data import DataConfig
from flash_lm.config.registry import CORPORA
from flash_lm.data.token_cache import existing_tokenizer
from flash_lm.data.tokenizer import SPECIALS, Tokenizer


class Expected(NamedTuple):
    """The vocabulary and the labels of a corpus.

    Attributes:
        vocab_size: V; None: only the corpus has it.
        mask: id of a masked token; it may be the first after the vocabulary.
        labels: names of the labels; empty: there are none, or only the corpus has them.
    """

    vocab_size: int | None
    mask: int = 0
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, labels: tuple[str, ...] = ()) -> "Expected":
        """What a tokenizer says."""
        return cls(tokenizer.vocab_size, tokenizer.mask, labels)


def expected_corpus(config: DataConfig) -> Expected:
    """What `config` says of its corpus; nothing but a tokenizer's own file is read.

    Raises:
        InputError: data.tokenizer_path is wrong.
    """
    kind = CORPORA[config.corpus]
    if not kind.examples:
        tokenizer = existing_tokenizer(config)
        # One that is trained has the size that is asked for, and a token for masks.
        return Expected.of(tokenizer) if tokenizer else Expected(config.vocab_size, len(SPECIALS) - 1)
    # Examples are made on access, or they are in files.
    if not kind.reads_path:
        corpus = kind.load(config, None, *(config[section] for section in kind.sections))
        return Expected.of(corpus.tokenizer, corpus.labels)
    named = existing_tokenizer(config) if kind.uses_parent_tokenizer else None
    tokenizer = named or kind.tokenizer
    return Expected.of(tokenizer) if tokenizer else Expected(None)
