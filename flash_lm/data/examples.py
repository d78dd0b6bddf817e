"""Corpora of examples: each example is one row, with a prefix and a part to be predicted from it."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from flash_lm.data.packing import Row, empty_row
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError

NO_TARGET = -1


class Example(NamedTuple):
    """The tokens of an example, and which of them are targets.

    Attributes:
        ids: its tokens, (n,) int32; where each is predicted from those before it, they start with begin-of-text.
        prompt_length: number of first tokens that are never targets.
        targets: what is predicted at each token, (n,) int32, NO_TARGET: nothing; None: the token after it.
        label: number of the example's label, for tasks that predict it; None: the corpus has no labels.
    """

    ids: np.ndarray
    prompt_length: int = 1
    targets: np.ndarray | None = None
    label: int | None = None


class Examples(Protocol):
    """The interface of a split of examples.

    Attributes:
        longest: number of tokens that a row needs for the longest example, to predict each from those before.

    An attribute `size` says how many tokens all of them have, where a key sets it: they may then be longer than a row,
    to be read with a carried state. `parts` names the rows that belong together. `best_nll` is the smallest loss of a
    row that a model can have, nats. All three may be missing.
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
    """A corpus of examples: all splits with their tokenizer.

    Attributes:
        name: name of the corpus.
        fingerprint: hash of the content.
        tokenizer: the tokenizer that comes with the corpus.
        splits: splits by name.
        labels: names of the labels; empty: no labels.
        stream: None, since it is not read during training.
        parts: empty, since it is no mixture.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: Mapping[str, Examples]
    labels: tuple[str, ...] = ()
    stream: None = None
    parts: tuple[()] = ()


class ExampleRows:
    """Rows of one example each, followed by padding."""

    def __init__(self, examples: Examples, length: int, begin: int):
        """Rows of `length` tokens; `begin` is not used, since an example contains begin-of-text.

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
        # Without explicit targets, each token after the prefix is predicted from those before it.
        example = self._examples.example(row, self._length)
        if example.targets is None:
            inputs, targets = example.ids[:-1], example.ids[1:]
            asked = np.arange(len(targets)) >= example.prompt_length - 1
        else:
            inputs, targets, asked = example.ids, np.maximum(example.targets, 0), example.targets != NO_TARGET
        arrays = make_row(inputs, self._length)
        arrays["targets_BxL"][: len(targets)] = targets
        arrays["loss_mask_BxL"][: len(asked)] = asked
        return arrays


def make_row(ids: np.ndarray, length: int) -> Row:
    """A row of tokens, one document, without targets."""
    arrays = empty_row(length)
    arrays["inputs_BxL"][: len(ids)] = ids
    arrays["segment_ids_BxL"][: len(ids)] = 1
    arrays["positions_BxL"][: len(ids)] = np.arange(len(ids))
    return arrays
