"""Corpora of examples: each is one row, with a part that is given and a part that is to be predicted from it."""

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
        ids: its tokens, (n,) int32, begin-of-text first.
        given: how many of them, from the first on, are never a target.
    """

    ids: np.ndarray
    given: int


class Examples(Protocol):
    """A split of them.

    Attributes:
        longest: tokens to read of the longest one.
    """

    @property
    def longest(self) -> int:  # noqa: D102 (see above)
        ...

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def example(self, number: int, length: int) -> Example:
        """One of them, for a row of `length` tokens; those that can be made of any size fill it."""
        ...


@dataclasses.dataclass(frozen=True)
class ExampleCorpus:
    """All splits with their tokenizer.

    Attributes:
        name: of the corpus.
        fingerprint: hash of its content.
        tokenizer: its own.
        splits: by name.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: Mapping[str, Examples]
    stream: None = None


class ExampleRows:
    """One example a row, and padding after it."""

    def __init__(self, examples: Examples, length: int, begin: int):
        """Rows of `length`; `begin` is not needed, since examples bring it along.

        Raises:
            InputError: an example does not fit into a row.
        """
        del begin
        if examples.longest > length:
            raise InputError(
                f"rows of {length} tokens are too short for the examples, which need {examples.longest}: set "
                "--config.model.max_length (and data.length, if given) to that, and data.tokens_per_batch to a multiple"
            )
        self._examples, self._length = examples, length

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._examples)

    def __getitem__(self, row: int) -> Row:
        """The row of this number."""
        ids, given = self._examples.example(row, self._length)
        count = len(ids) - 1
        arrays = empty_row(self._length)
        arrays["inputs_BxL"][:count] = ids[:-1]
        arrays["targets_BxL"][:count] = ids[1:]
        arrays["loss_mask_BxL"][given - 1 : count] = 1
        arrays["segment_ids_BxL"][:count] = 1
        arrays["positions_BxL"][:count] = np.arange(count)
        return arrays
