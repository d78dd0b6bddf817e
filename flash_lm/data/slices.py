"""Evaluation slices of a split: rows, or targets of rows, that are scored separately."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from flash_lm.data.packing import Row, Rows
from flash_lm.data.splits import Splits
from flash_lm.data.token_cache import TokenizedCorpus
from flash_lm.data.tokenized_text import TokenizedText
from flash_lm.errors import InputError

ALL = "all"  # of the targets: the slice that is none
_FIRST_POSITIONS = 64  # of a row: the first slice of them
_PUBLISHED_RARE, _PUBLISHED_TOKENS = 1250, 10**10


class Slices(NamedTuple):
    """The slices of one kind, with a mask of targets for each.

    Attributes:
        names: of the K slices.
        masks: of a row's number and arrays: its targets in each slice, K×L or K×1 bool.
    """

    names: Sequence[str]
    masks: Callable[[int, Row], np.ndarray]


SlicesOf = Callable[[Any], Slices]  # of all rows of the split, of one length


class SlicedRows:
    """Rows with a mask of their targets in each slice.

    Attributes:
        names: of the slices.
    """

    def __init__(self, rows: Rows, slices: Slices):
        """Takes all rows of a split."""
        self._rows, self._masks, self.names = rows, slices.masks, slices.names

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, row: int) -> Row:
        """The row with this number, and `slices_BxKxL`."""
        arrays = self._rows[row]
        shape = len(self.names), len(arrays["inputs_BxL"])
        return arrays | {"slices_BxKxL": np.broadcast_to(self._masks(row, arrays), shape)}


class SomeRows:
    """A range of the rows of a split."""

    def __init__(self, rows: Rows, numbers: range):
        """Takes all rows, and the numbers of those to keep."""
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._numbers)

    def __getitem__(self, row: int) -> Row:
        """The row with this number among them."""
        return self._rows[self._numbers[row]]


class Recalled:
    """Finds targets that end a pair of tokens that occurred earlier in the row and is rare in training.

    "Zoology" (Arora et al. 2023, section 3): what a model can only know from the row itself. A pair is rare if the
    training split has it at most `rare` times.
    """

    def __init__(self, train: TokenizedText, rare: int):
        """Counts the pairs of the training split."""
        tokens = np.asarray(train.tokens, np.int64)
        self._words = int(tokens.max()) + 1
        pairs, counts = np.unique(tokens[:-1] * self._words + tokens[1:], return_counts=True)
        self._frequent = pairs[counts > rare]

    def __call__(self, row: Row) -> np.ndarray:
        """(L,) bool."""
        inputs, targets = row["inputs_BxL"].astype(np.int64), row["targets_BxL"].astype(np.int64)
        pairs = inputs * self._words + targets
        # Words that training does not have make no frequent pair, and no pair of theirs may look like one.
        frequent = (targets < self._words) & _is_in(pairs, self._frequent)
        # The first occurrence of a pair in its document cannot be recalled.
        first = np.zeros(len(inputs), bool)
        in_document = np.stack([row["segment_ids_BxL"], inputs, targets])
        first[np.unique(in_document, axis=1, return_index=True)[1]] = True
        return ~first & ~frequent


def _is_in(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether values are among sorted ones; `np.isin` would sort them again for every row."""
    indices = np.searchsorted(known, values)
    return (indices < len(known)) & (known[np.minimum(indices, len(known) - 1)] == values) if len(known) else values < 0


def recall_slices(corpus: Splits, split: str, rare: int | None) -> SlicesOf:
    """The slices `recall`, see `Recalled`, and `rest`.

    Args:
        corpus: a corpus of text with its training split.
        split: not used.
        rare: the largest number of times that a rare pair stands in training; None: as published in proportion, 1250 in
            10 billion tokens, and at least 1.

    Raises:
        InputError: the corpus is not text, or its training split is a stream.
    """
    if not isinstance(corpus, TokenizedCorpus) or "train" not in corpus.splits:
        raise InputError(
            "--slices=recall counts pairs of tokens in the training split: it needs a corpus of text on disk"
        )
    # Counts of the training split say which pairs are rare there.
    train = corpus.splits["train"]
    recalled = Recalled(train, rare_pairs(train) if rare is None else rare)

    def both(number: int, row: Row) -> np.ndarray:
        del number
        mask = recalled(row)
        return np.stack([mask, ~mask])

    return lambda rows: Slices(["recall", "rest"], both)


def rare_pairs(train: TokenizedText) -> int:
    """The published bound in proportion to the training split."""
    return max(1, round(_PUBLISHED_RARE / _PUBLISHED_TOKENS * len(train.tokens)))


def position_slices(corpus: Splits, split: str, rare: int | None) -> SlicesOf:
    """Targets by the number of tokens that the row has before them: 0–63, 64–127, 128–255, ….

    In rows that keep documents apart, only those of the target's document count; in a stream all do, since the
    model sees them.
    """
    del corpus, split, rare

    def slices_of(rows: Rows) -> Slices:
        # Each slice is as long as all before it, from a shortest first one on.
        begins, length = [0], len(rows[0]["inputs_BxL"])
        while (after := max(_FIRST_POSITIONS, 2 * begins[-1])) < length:
            begins.append(after)
        ends = [*begins[1:], length]
        low_Kx1, high_Kx1 = np.array(begins)[:, None], np.array(ends)[:, None]
        between = lambda number, row: (low_Kx1 <= row["positions_BxL"]) & (row["positions_BxL"] < high_Kx1)
        return Slices([f"{low}–{high - 1}" for low, high in zip(begins, ends, strict=True)], between)

    return slices_of


def part_slices(corpus: Splits, split: str, rare: int | None) -> SlicesOf:
    """The parts of a made corpus, such as rows of one length and number of pairs, or the texts of a mixture.

    Raises:
        InputError: the corpus has no parts.
    """
    del rare
    # Parts of a mixture are ranges of sequences; a synthetic corpus names its own parts.
    made: Any = corpus.splits[split]
    if not corpus.parts and not hasattr(made, "parts"):
        raise InputError(f"--slices=parts needs a corpus of parts, such as mqar or a mixture: {corpus.name} has none")

    def slices_of(rows: Any) -> Slices:
        numbers = dict(zip(corpus.parts, rows.ranges, strict=True)) if corpus.parts else made.parts()
        return Slices([*numbers], lambda row, _: np.array([[row in part] for part in numbers.values()]))

    return slices_of


def all_targets(corpus: Splits, split: str, rare: int | None) -> SlicesOf:
    """All of them, which are scored in one pass with slices of them."""
    del corpus, split, rare
    return lambda rows: Slices([ALL], lambda number, row: np.ones((1, 1), bool))


def merge_slices(kinds: Collection[Slices]) -> Slices:
    """Slices of several kinds, whose masks are K×L."""

    def masks(number: int, row: Row) -> np.ndarray:
        masks_of_kinds = [kind.masks(number, row) for kind in kinds]
        # Masks of a column hold for all targets of the row.
        length = max(x.shape[1] for x in masks_of_kinds)
        return np.concatenate([np.broadcast_to(x, (len(x), length)) for x in masks_of_kinds])

    return Slices([name for kind in kinds for name in kind.names], masks)


SLICES: dict[str, Callable[[Splits, str, int | None], SlicesOf]] = {
    ALL: all_targets,
    "recall": recall_slices,
    "positions": position_slices,
    "parts": part_slices,
}
