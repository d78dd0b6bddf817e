"""Corpora of examples: each example is one row, with a given part and a part to be predicted from it."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from flash_lm.data.packing import Row, empty_row
from flash_lm.data.tokenizers import Tokenizer
from flash_lm.errors import InputError


class Example(NamedTuple):
    """One example.

    Attributes:
        ids: its tokens, (n,) int32, starting with begin-of-text.
        given: how many of the first tokens are never a target.
    """

    ids: np.ndarray
    given: int


class Examples(Protocol):
    """One split of examples.

    Attributes:
        longest: number of tokens that a row needs for the longest example.
    """

    @property
    def longest(self) -> int:  # noqa: D102 (see above)
        ...

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def example(self, number: int, length: int) -> Example:
        """One example, for a row of `length` tokens; examples that can have any size fill it."""
        ...


@dataclasses.dataclass(frozen=True)
class ExampleCorpus:
    """All splits with their tokenizer.

    Attributes:
        name: name of the corpus.
        fingerprint: hash of the content.
        tokenizer: the corpus's own tokenizer.
        splits: splits by name.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: Mapping[str, Examples]
    stream: None = None


class ExampleRows:
    """One example a row, followed by padding."""

    def __init__(self, examples: Examples, length: int, begin: int):
        """Rows of `length` tokens; `begin` is not used, since each example has its own begin-of-text.

        Raises:
            InputError: an example does not fit in a row.
        """
        del begin
        if examples.longest > length:
            raise InputError(
                f"rows of {length} tokens are too short for the examples, which need {examples.longest}: set "
                "--config.model.max_length (and data.length, if given) to that, and data.tokens_per_batch to a multiple"
            )
        self._examples, self._length = examples, length

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._examples)

    def __getitem__(self, row: int) -> Row:
        """The row with this number."""
        ids, given = self._examples.example(row, self._length)
        count = len(ids) - 1
        arrays = empty_row(self._length)
        arrays["inputs_BxL"][:count] = ids[:-1]
        arrays["targets_BxL"][:count] = ids[1:]
        arrays["loss_mask_BxL"][given - 1 : count] = 1
        arrays["segment_ids_BxL"][:count] = 1
        arrays["positions_BxL"][:count] = np.arange(count)
        return arrays
