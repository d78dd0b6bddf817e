"""Sequence packing: rows of `length` tokens from a token store, in the two ways of `data.pack`, cut on access.

A row is a dict of arrays of length L: inputs, targets, segment_ids and positions int32, loss_mask float32. In both ways
every token but begin-of-text is a target exactly once.
"""

import bisect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from flash_lm.data.tokenized_text import TokenizedText

Row = dict[str, np.ndarray]


class Rows(Protocol):
    """The interface of packed rows, indexed by number."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def __getitem__(self, row: int) -> Row:
        """The row with this number."""
        ...


Packer = Callable[[Any, int, int], Rows]  # takes a split, a length and the id of begin-of-text

_OPEN_ROWS = 64  # that the packer keeps open at a time


class StreamRows:
    """Packs documents joined and cut to length, one segment per row; only the last row may have padding."""

    def __init__(self, store: TokenizedText, length: int, begin: int):
        """Packs a split; `begin` is the id of begin-of-text, which is never a target."""
        self._tokens, self._length, self._begin = store.tokens, length, begin

    def __len__(self) -> int:
        """The number of rows."""
        return -(-(len(self._tokens) - 1) // self._length)

    def __getitem__(self, row: int) -> Row:
        """The row with this number."""
        # One token more than the sequence: inputs and targets are shifted by one.
        window = np.asarray(self._tokens[row * self._length : (row + 1) * self._length + 1], np.int32)
        count = len(window) - 1
        arrays = empty_row(self._length)
        arrays["inputs_BxL"][:count] = window[:-1]
        arrays["targets_BxL"][:count] = window[1:]
        # The end of a document announces the next, so its begin-of-text would be too easy to predict.
        arrays["loss_mask_BxL"][:count] = window[1:] != self._begin
        arrays["segment_ids_BxL"][:count] = 1
        arrays["positions_BxL"][:count] = np.arange(count)
        return arrays


class DocumentRows:
    """Packs isolated documents, several a row; one longer than a row continues in a segment of another row."""

    def __init__(self, store: TokenizedText, length: int, begin: int):
        """Packs a split; `begin` is not used, since no segment crosses the start of a document."""
        del begin
        self._tokens, self._length = store.tokens, length
        # Best-fit packing; the segments are then sorted by row, so that a row is a range of them.
        starts, sizes = _segments(store.starts, length)
        rows = _best_fit(sizes, length)
        order = np.argsort(rows, kind="stable")
        self._starts, self._sizes = starts[order], sizes[order]
        self._bounds = np.searchsorted(rows[order], np.arange(rows.max() + 2))

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._bounds) - 1

    def __getitem__(self, row: int) -> Row:
        """The row with this number."""
        # Segments follow each other; padding keeps segment 0.
        arrays, offset = empty_row(self._length), 0
        for number, i in enumerate(range(self._bounds[row], self._bounds[row + 1]), start=1):
            start, size = self._starts[i], self._sizes[i]
            span = slice(offset, offset + size)
            arrays["inputs_BxL"][span] = self._tokens[start : start + size]
            arrays["targets_BxL"][span] = self._tokens[start + 1 : start + size + 1]
            arrays["loss_mask_BxL"][span] = 1
            arrays["segment_ids_BxL"][span] = number
            arrays["positions_BxL"][span] = np.arange(size)
            offset += size
        return arrays


PACKERS: dict[str, Packer] = {"stream": StreamRows, "documents": DocumentRows}


def empty_row(length: int) -> Row:
    """A row of padding."""
    names = ("inputs_BxL", "targets_BxL", "segment_ids_BxL", "positions_BxL")
    return {name: np.zeros(length, np.int32) for name in names} | {"loss_mask_BxL": np.zeros(length, np.float32)}


def _segments(document_starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and size of each segment: a document of n tokens has n − 1 predictions, cut to `length`."""
    first, predictions = document_starts[:-1], np.diff(document_starts) - 1
    counts = -(-predictions // length)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(first, counts) + within * length
    sizes = np.minimum(np.repeat(predictions, counts) - within * length, length)
    return starts, sizes


def _best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """The row of each segment: the open row that it fills best, or a new one. The order is fixed, so the result is."""
    # Open rows are sorted by the room that is left, so that the best fit is the first one with enough room.
    rows = np.empty(len(sizes), np.int64)
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    count = 0
    for i, size in enumerate(sizes.tolist()):
        index = bisect.bisect_left(open_rows, (size, -1))
        if index < len(open_rows):
            room, row = open_rows.pop(index)
        else:
            room, row, count = length, count, count + 1
        rows[i] = row
        # A bounded number of open rows keeps the search short; the fullest row is closed first.
        if room > size:
            bisect.insort(open_rows, (room - size, row))
            if len(open_rows) > _OPEN_ROWS:
                open_rows.pop(0)
    return rows
