"""Rows that have one label each: an example, or the beginning of a document of text."""

import dataclasses
from typing import Any

import numpy as np

from flash_lm.data.examples import Example, Examples, row_of
from flash_lm.data.packing import Row
from flash_lm.data.token_cache import TokenizedCorpus
from flash_lm.data.tokenized_text import TokenizedText
from flash_lm.errors import InputError


def with_labels(corpus: TokenizedCorpus, source: Any) -> TokenizedCorpus:
    """A corpus of text with its documents' labels.

    Args:
        corpus: the corpus as tokens.
        source: the corpus that they were made from; `labels(split)` gives names, document by document.

    Raises:
        InputError: the source has changed, a label is missing, or only the training split lacks one.
    """
    if source.fingerprint != corpus.fingerprint:
        raise InputError(f"corpus {corpus.name} has changed, so its labels do not belong to the old tokens: restore it")
    found = {split: source.labels(split) for split in corpus.splits}
    names = source.label_names()
    numbers = {name: i for i, name in enumerate(names)}
    splits = {}
    for split, text in corpus.splits.items():
        if unknown := sorted(set(found[split]) - set(names)):
            raise InputError(
                f"the {split} split of corpus {corpus.name} has the label {unknown[0]}, which the training split "
                f"lacks; it has {', '.join(names)}"
            )
        labels = np.array([numbers[name] for name in found[split]], np.int32)
        splits[split] = dataclasses.replace(text, labels=labels)
    return dataclasses.replace(corpus, splits=splits, labels=names)


class LabelledText:
    """The documents of a split of text as examples; what does not fit into a row is cut off at the end."""

    longest = 0  # any row will do

    def __init__(self, text: TokenizedText):
        """Needs a text with labels."""
        assert text.labels is not None
        self._text, self._labels = text, text.labels

    def __len__(self) -> int:
        """The number of documents."""
        return len(self._text.starts) - 1

    def example(self, number: int, length: int) -> Example:
        """The first tokens of a document, with its label."""
        start, end = self._text.starts[number : number + 2]
        ids = np.asarray(self._text.tokens[start : min(end, start + length)], np.int32)
        return Example(ids, label=int(self._labels[number]))


def cut_share(split: Any, length: int) -> float:
    """The share of a split's documents that do not fit into rows of `length` tokens; examples always do."""
    return float(np.mean(np.diff(split.starts) > length)) if isinstance(split, TokenizedText) else 0.0


class LabelledRows:
    """One example a row, followed by padding; the row's first target is its label, and it has no other."""

    def __init__(self, split: Any, length: int, begin: int):
        """Rows of `length` tokens; `begin` is not used, since each example has its own begin-of-text.

        Raises:
            InputError: an example does not fit in a row.
        """
        del begin
        self._examples: Examples = LabelledText(split) if isinstance(split, TokenizedText) else split
        if self._examples.longest >= length:
            raise InputError(
                f"rows of {length} tokens are too short for the examples, which have {self._examples.longest + 1}: set "
                "--config.model.max_length (and data.length, if given) to that, and data.tokens_per_batch to a multiple"
            )
        self._length = length

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._examples)

    def __getitem__(self, row: int) -> Row:
        """The row with this number."""
        example = self._examples.example(row, self._length)
        arrays = row_of(example.ids, self._length)
        arrays["targets_BxL"][0] = example.label
        arrays["loss_mask_BxL"][0] = 1
        return arrays
