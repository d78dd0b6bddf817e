"""Batches for a state that is carried from row to row: each row of a batch is a stream of documents, none packed.

A batch has as many streams as rows. A stream reads its documents one after another, row by row; each begins a new
row, and its last row ends in padding. So a row either begins a document, at position 0, or goes on from the row with
the same index in the batch before.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from flash_lm.data.batches import Batch, stack
from flash_lm.data.examples import ExampleRows, Examples
from flash_lm.data.packing import Row, empty_row
from flash_lm.data.share import Share
from flash_lm.data.tokenized_text import TokenizedText

_ORDER = 0x0D0C  # keeps the order of documents separate from other random numbers


class CarriedBatches:
    """Endless batches of carried rows: all documents once an epoch, shuffled anew each epoch.

    A document goes to the stream that is free first. Which stream reads what is computed without reading any text, so
    the step alone is enough to resume, and hosts need not talk.
    """

    def __init__(self, store: TokenizedText, length: int, share: Share, *, seed: int, start_step: int = 0):
        """Starts at a step.

        Args:
            store: the tokens of the training split.
            length: L.
            share: this host's share of each batch.
            seed: the order of an epoch is drawn from (seed, epoch).
            start_step: step of the first batch.
        """
        documents = _Texts(store, length)

        def endless() -> Iterator[int]:
            for epoch in itertools.count():
                # A function of the epoch alone, so that a resumed run draws the same order.
                draw = np.random.default_rng(np.random.SeedSequence((seed, epoch, _ORDER)))
                yield from draw.permutation(len(documents)).tolist()

        self._batches = _batches(documents, endless(), share, start_step)

    def __iter__(self) -> Iterator[Batch]:
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """This host's rows of the next batch, a dict of arrays of L columns."""
        return next(self._batches)

    def state(self) -> None:
        """None: the step is the only state."""


def carried_once(
    split: TokenizedText | Examples, length: int, share: Share, limit: int = 0, first: int | None = None
) -> Iterator[Batch]:
    """Evaluation batches of carried rows: every document once, in order; streams without further documents get padding.

    Args:
        split: the tokens of a split, or examples that all have a `size`.
        length: L.
        share: this host's share of each batch.
        limit: number of batches; 0 = all.
        first: tokens at the beginning of each document of text that are read, rounded up to rows; None: all.

    Yields:
        This host's rows of each batch, as dicts of arrays of L columns.
    """
    is_text = isinstance(split, TokenizedText)
    documents = _Texts(split, length, first) if is_text else _LongExamples(split, length)
    batches = _batches(documents, range(len(documents)), share, 0)
    return itertools.islice(batches, limit) if limit else batches


class _Documents(Protocol):
    """The documents of a split, in rows of `length` tokens."""

    length: int

    def __len__(self) -> int: ...

    def rows(self, document: int) -> int:
        """Number of rows of a document."""
        ...

    def row(self, document: int, number: int) -> Row:
        """A row of a document."""
        ...


class _Texts:
    """The documents of a text as rows, cut on access."""

    def __init__(self, store: TokenizedText, length: int, first: int | None = None):
        self._first = first
        self._tokens, self._starts, self.length = store.tokens, store.starts, length

    def __len__(self) -> int:
        return len(self._starts) - 1

    def rows(self, document: int) -> int:
        """Every token but begin-of-text is a target once."""
        predictions = int(self._starts[document + 1] - self._starts[document]) - 1
        return -(-min(predictions, self._first or predictions) // self.length)

    def row(self, document: int, number: int) -> Row:
        """A row of a document."""
        offset = number * self.length
        first = int(self._starts[document]) + offset
        # Inputs and targets overlap by all but one token; a document's last row is shorter.
        window = np.asarray(self._tokens[first : min(first + self.length + 1, self._starts[document + 1])], np.int32)
        arrays, count = empty_row(self.length), len(window) - 1
        arrays["inputs_BxL"][:count] = window[:-1]
        arrays["targets_BxL"][:count] = window[1:]
        arrays["loss_mask_BxL"][:count] = 1
        arrays["segment_ids_BxL"][:count] = 1
        arrays["positions_BxL"][:count] = offset + np.arange(count)
        return arrays


class _LongExamples:
    """Examples of one size as rows, cut on access; an example may be longer than a row."""

    def __init__(self, examples: Any, length: int):
        self._rows = ExampleRows(examples, examples.size, begin=0)
        self._tokens, self.length = examples.size, length

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, document: int) -> int:
        """The same for all."""
        del document
        return -(-self._tokens // self.length)

    def row(self, document: int, number: int) -> Row:
        """A part of the row that the example would fill."""
        window = slice(number * self.length, (number + 1) * self.length)
        arrays = empty_row(self.length)
        for name, array in self._rows[document].items():
            arrays[name][: len(array[window])] = array[window]
        return arrays


def _batches(documents: _Documents, order: Iterable[int], share: Share, start: int) -> Iterator[Batch]:
    """Batches from number `start` on, until all documents of the order are read."""
    coming = iter(order)
    # A heap of streams, so that the assignment needs only the lengths of the documents, and no text.
    # When each stream is free, and which stream that is: the first is at the top, of two the lower number.
    free = [(0, stream) for stream in range(share.batch_size)]
    reading: dict[int, tuple[int, int]] = {}  # stream -> document, and the batch that it began in
    padding = empty_row(documents.length)
    row = lambda document, begin, batch: documents.row(document, batch - begin)
    for batch in itertools.count(start):
        # Streams whose document has ended take the next one, and leave the heap when none is left.
        while free and free[0][0] <= batch:
            begin, stream = free[0]
            document = next(coming, None)
            if document is None:
                heapq.heappop(free)
                reading.pop(stream, None)
                continue
            reading[stream] = document, begin
            heapq.heapreplace(free, (begin + documents.rows(document), stream))
        if not reading:
            return
        yield stack([row(*reading[stream], batch) if stream in reading else padding for stream in share.rows])
