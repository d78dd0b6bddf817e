"""Classification: rows with one label each, from examples, or from the first tokens of documents or of pairs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from flash_lm.data.examples import Example, Examples, make_row
from flash_lm.data.packing import Row
from flash_lm.data.token_cache import TokenizedCorpus
from flash_lm.data.tokenized_text import TokenizedText
from flash_lm.errors import InputError


def attach_labels(corpus: TokenizedCorpus, source: Any, share: float) -> TokenizedCorpus:
    """Adds labels to the documents of a corpus of text, or to its pairs of documents.

    Args:
        corpus: the corpus as tokens.
        source: the corpus that they were made from; `labels(split)` gives names, one for each document or pair.
        share: of the training split that is kept.

    Raises:
        InputError: the source has changed, a label is missing, only the training split lacks one, or none of its texts
            has a label because of `share`.
    """
    if source.fingerprint != corpus.fingerprint:
        raise InputError(f"corpus {corpus.name} has changed, so its labels do not belong to the old tokens: restore it")
    labels_of = {split: source.labels(split) for split in corpus.splits}
    names = source.label_names()
    numbers = {name: i for i, name in enumerate(names)}
    # Number the labels in each split as the training split does.
    splits = {}
    for split, text in corpus.splits.items():
        if unknown := sorted(set(labels_of[split]) - set(names)):
            raise InputError(
                f"the {split} split of corpus {corpus.name} has the label {unknown[0]}, which the training split "
                f"lacks; it has {', '.join(names)}"
            )
        labels = np.array([numbers[name] for name in labels_of[split]], np.int32)
        splits[split] = dataclasses.replace(text, labels=labels)
    # Keep a share of the training split, in which every label must still occur.
    if share < 1 and "train" in splits:
        splits["train"] = _sample_share(splits["train"], share)
        if lost := set(range(len(names))) - set(_labels_of(splits["train"]).tolist()):
            raise InputError(
                f"data.label_share={share:g} leaves no text of the training split with the label "
                f"{', '.join(names[i] for i in sorted(lost))}: raise it"
            )
    return dataclasses.replace(corpus, splits=splits, labels=names)


def _sample_share(text: TokenizedText, share: float) -> TokenizedText:
    """A share of the labelled texts, at least one, drawn at random; a smaller share is part of a larger one."""
    labels, each = _labels_of(text), texts_of_label(text)
    # A prefix of one fixed permutation, so that shares are nested.
    chosen = np.random.default_rng(0).permutation(len(labels))[: max(1, round(share * len(labels)))]
    documents = (chosen[:, None] * each + np.arange(each)).ravel()
    kept = [text.tokens[text.starts[i] : text.starts[i + 1]] for i in documents]
    starts = np.cumsum([0, *map(len, kept)])
    unknown = {"words": 0, "lines": 0, "bytes": 0}
    return dataclasses.replace(text, tokens=np.concatenate(kept), starts=starts, labels=labels[chosen], **unknown)


def texts_of_label(text: TokenizedText) -> int:
    """Documents that share a label: 1, or 2 of a pair."""
    return (len(text.starts) - 1) // len(_labels_of(text))


def _labels_of(text: TokenizedText) -> np.ndarray:
    assert text.labels is not None
    return text.labels


class LabelledText:
    """A split of text as examples, one per document or pair of documents; the end that does not fit into a row is cut.

    A text is cut at its end; of a pair, one after the other, the longer text is cut first.
    """

    longest = 0  # any row will do

    def __init__(self, text: TokenizedText):
        """Needs a text with labels."""
        self._text, self._labels, self._each = text, _labels_of(text), texts_of_label(text)

    def __len__(self) -> int:
        """The number of documents, or of pairs."""
        return len(self._labels)

    def example(self, number: int, length: int) -> Example:
        """The first tokens of a document, or of each of a pair, with the label."""
        first, tokens = number * self._each, self._text.tokens
        starts = self._text.starts[first : first + self._each + 1]
        sizes = sizes_in_row(np.diff(starts), length)
        parts = [tokens[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]
        return Example(np.concatenate(parts).astype(np.int32), label=int(self._labels[number]))


def sizes_in_row(sizes: Sequence[int] | np.ndarray, length: int) -> list[int]:
    """The number of tokens of one text, or of each of two, that fit into a row: the longer one is cut first."""
    if len(sizes) == 1:
        return [min(sizes[0], length)]
    # Cut the longer text first, until both have half of the row.
    first, second = sizes
    kept = min(first, max(length - length // 2, length - second))
    return [kept, min(second, length - kept)]


def cut_share(split: Any, length: int) -> float:
    """The share of a split's texts, or pairs, that do not fit into rows of `length` tokens; examples always do."""
    if not isinstance(split, TokenizedText):
        return 0.0
    return float(np.mean(np.diff(split.starts[:: texts_of_label(split)]) > length))


class LabelledRows:
    """Rows of one example each, followed by padding; the label is the row's first target, and its only one."""

    def __init__(self, split: Any, length: int, begin: int):
        """Rows of `length` tokens; `begin` is not used, since an example contains begin-of-text.

        Raises:
            InputError: an example does not fit in a row.
        """
        del begin
        self._examples: Examples = LabelledText(split) if isinstance(split, TokenizedText) else split
        # Examples are never cut; texts are.
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
        arrays = make_row(example.ids, self._length)
        arrays["targets_BxL"][0] = example.label
        arrays["loss_mask_BxL"][0] = 1
        return arrays
