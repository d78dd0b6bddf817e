"""Pairs of texts, of which the second is predicted from the first: as examples, and as rows for an encoder–decoder."""

import numpy as np

from flash_lm.data.examples import Example, ExampleCorpus, Examples, make_row
from flash_lm.data.labelled import sizes_in_row
from flash_lm.data.packing import Row
from flash_lm.data.token_cache import TokenizedCorpus
from flash_lm.data.tokenized_text import TokenizedText
from flash_lm.errors import InputError


def make_pair_corpus(corpus: TokenizedCorpus) -> ExampleCorpus:
    """Makes a corpus of pairs from a text whose documents are the first and the second of each pair, in turn."""
    splits = {name: TextPairs(text) for name, text in corpus.splits.items()}
    return ExampleCorpus(corpus.name, corpus.fingerprint, corpus.tokenizer, splits)


class TextPairs:
    """A split of pairs, <s> first </s> <s> second </s>; if a pair is longer than a row, the longer text is cut."""

    longest = 0  # any row will do

    def __init__(self, text: TokenizedText):
        """Needs a text with an even number of documents."""
        self._text = text

    def __len__(self) -> int:
        """The number of pairs."""
        return (len(self._text.starts) - 1) // 2

    def example(self, number: int, length: int) -> Example:
        """A pair that fits into a row of `length` tokens, of which the last is only a target."""
        pair = self.pair(number)
        sizes = sizes_in_row([len(ids) for ids in pair], length + 1)
        parts = [ids[:size] for ids, size in zip(pair, sizes, strict=True)]
        return Example(np.concatenate(parts), prompt_length=sizes[0] + 1)

    def pair(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Both documents of a pair, int32."""
        start, middle, stop = self._text.starts[2 * number : 2 * number + 3]
        first, second = self._text.tokens[start:middle], self._text.tokens[middle:stop]
        return np.asarray(first, np.int32), np.asarray(second, np.int32)


class SourceRows:
    """Rows of one example each: its first part is the source, and each token of its second part is predicted.

    The first part ends before the last token of the prefix, such as the second begin-of-text of <s> first <s> second.
    """

    def __init__(self, examples: Examples, length: int, begin: int):
        """Rows of `length` tokens, and sources of as many; `begin` is the id of begin-of-text.

        Raises:
            InputError: the examples have no first part, or no second one, or one does not fit.
        """
        self._examples, self._length = examples, length
        if isinstance(examples, TextPairs):
            return
        # One example stands for all of a corpus: its prefix must end with begin-of-text.
        ids, prefix, targets, _ = examples.example(0, 2 * length)
        if targets is not None or prefix < 2 or ids[prefix - 1] != begin:
            raise InputError(
                "task=seq2seq needs examples whose second part begins with begin-of-text: use couplets, copy, or hf "
                "with data.pair_column"
            )
        if (longest := max(examples.longest, len(ids))) > 2 * length:
            raise InputError(
                f"sources and rows of {length} tokens are too short for the examples, which need {longest} in all: set "
                "--config.model.max_length (and data.length, if given) to half of that, and data.tokens_per_batch to "
                "a multiple"
            )

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._examples)

    def __getitem__(self, row: int) -> Row:
        """The row with this number."""
        # Source and target are cut to a row each; the target is shifted by one token.
        source, target = self._parts(row)
        source, target = source[: self._length], target[: self._length + 1]
        arrays, count = make_row(target[:-1], self._length), len(target) - 1
        arrays["targets_BxL"][:count], arrays["loss_mask_BxL"][:count] = target[1:], 1
        source_row = make_row(source, self._length)
        return arrays | {
            "source_BxM": source_row["inputs_BxL"],
            "source_segment_ids_BxM": source_row["segment_ids_BxL"],
        }

    def _parts(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self._examples, TextPairs):
            return self._examples.pair(row)
        ids, prefix, *_ = self._examples.example(row, 2 * self._length)
        return ids[: prefix - 1], ids[prefix - 1 :]
