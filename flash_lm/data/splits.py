"""Loads the corpus of a config, ready to be cut into rows: text as tokens, or examples."""

from typing import Any

from flash_lm.config.data import DataConfig
from flash_lm.config.registry import CORPORA
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import ExampleCorpus, ExampleRows
from flash_lm.data.files import with_local_files
from flash_lm.data.labelled import attach_labels
from flash_lm.data.packing import PACKERS
from flash_lm.data.pairs import make_pair_corpus
from flash_lm.data.token_cache import KnownCorpus, TokenizedCorpus, load_corpus, load_tokenized
from flash_lm.data.tokenized_text import TokenizedText

Splits = TokenizedCorpus | ExampleCorpus

# data.pack -> the packer of a split's rows
ROWS = PACKERS | {"examples": ExampleRows}


def load_splits(config: DataConfig, known: KnownCorpus | None = None, *, unsplit: bool = False) -> Splits:
    """Loads all splits of the corpus that `config` names, with their tokenizer.

    Args:
        config: names the corpus.
        known: what a run knows of its corpus; None: outside of a run.
        unsplit: for text: only one split, WHOLE, with all of it.

    Raises:
        InputError: the corpus cannot be loaded, or it is empty.
    """
    # Examples have tokens already; text comes from the token cache, and becomes pairs or gets labels.
    kind = CORPORA[config.corpus]
    if kind.examples:
        return kind.load(with_local_files(config), known, *(config[section] for section in kind.sections))
    corpus = load_tokenized(config, known, unsplit=unsplit)
    if kind.paired(config):
        return make_pair_corpus(corpus)
    return attach_labels(corpus, load_corpus(config), config.label_share) if kind.labelled(config) else corpus


def split_sizes(corpus: Splits) -> str:
    """Describes the size of each split, for a person."""
    return "; ".join(f"{split} {_size(corpus.splits.get(split))}" for split in SPLITS)


def _size(split: Any) -> str:
    if split is None:
        return "read as a stream"
    if isinstance(split, TokenizedText):
        return f"{len(split.tokens):,} tokens in {len(split.starts) - 1:,} documents"
    return f"{len(split):,} examples"
