"""Streaming: batches of a corpus that is read during training, with a shuffle buffer.

A run has a fixed number of streams, each with its part of the documents and its rows of every batch: those that a group
of hosts needed when the run began. A host reads the streams that have rows of its share, so that the batches are the
same on any number of hosts.

A stream is read in buffers of many documents, which are shuffled. A buffer is used in windows of some megabytes. Each
window is tokenised and packed like a small corpus, with its rows in random order. The saved position is the start of
the buffer, the number of windows since then, and the number of rows used; a resumed run reads the buffer again and
continues exactly.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from flash_lm.data.batches import Batch, Transform, stack
from flash_lm.data.corpus import DocumentStream, cut
from flash_lm.data.packing import Packer, Row, Rows
from flash_lm.data.share import Share
from flash_lm.data.tokenized_text import encode_in_memory
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError

_WINDOW = 4 << 20  # characters of text
_OF_DOCUMENTS, _OF_SIZES = 1, 2  # random choices other than the order of the rows
Position = dict[str, Any]
_BEGINNING: Position = {"epoch": 0, "buffer": 0, "window": 0, "row": 0, "stream": None}


class _Window(NamedTuple):
    epoch: int
    number: int  # within its epoch
    buffer: int  # number of the first window of its buffer
    position: dict[str, Any] | None  # position of the stream before the buffer; None: the epoch's start
    rows: Rows


class StreamedBatches:
    """Endless batches of streams; a stream's end is the end of its epoch. Only the last row of a window has padding."""

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Tokenizer,
        packer: Packer,
        length: int,
        share: Share,
        *,
        buffer: int,
        seed: int,
        streams: int = 1,
        positions: Sequence[Position] = (),
        transform: Transform | None = None,
    ):
        """Starts at saved positions.

        Args:
            stream: all documents.
            tokenizer: tokenizer of the text.
            packer: packs a window's tokens into rows.
            length: L.
            share: this host's share.
            buffer: characters of text whose documents are shuffled together; 0: documents stay in order.
            seed: seed of the orders of documents and rows.
            streams: number of streams into which the documents are divided, at most the rows of a batch.
            positions: the position of each stream, from `state`; empty: the beginning.
            transform: makes the final row from a packed one, seed, epoch, number of the stream, window and row number.
        """
        self._share, self._rows, self._positions = share, {}, {}
        # The order of rows in which streams have their parts: of a new run that of its hosts, and then the saved one.
        order = [row for position in positions for row in position.get("rows", ())] if positions else share.order
        if len(order) != share.batch_size:  # earlier versions saved none, and a branch may have another batch
            order = range(share.batch_size)
        bounds = [share.batch_size * number // streams for number in range(streams + 1)]
        for number, rows in enumerate(order[begin:end] for begin, end in itertools.pairwise(bounds)):
            if not set(rows).isdisjoint(share.rows):
                part = stream.share(number, streams)
                reader = _Reader(number, part, tokenizer, packer, length, buffer, seed, transform)
                self._positions[number] = positions[number] if positions else _BEGINNING
                self._rows[number] = rows, reader.read(self._positions[number])

    def __iter__(self) -> Iterator[Batch]:
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """This host's rows of the next batch, a dict of arrays of L columns.

        Raises:
            InputError: a stream cannot be read; the positions stay those after the last batch.
        """
        # All rows of a stream are read, also those that other hosts take.
        batch, positions = {}, dict(self._positions)
        for number, (rows, source) in self._rows.items():
            for row in rows:
                batch[row], positions[number] = next(source)
        self._positions = positions
        return stack([batch[row] for row in self._share.rows])

    def state(self) -> dict[int, Position]:
        """The position after the last batch of each stream that this host reads, and its rows; a position is JSON."""
        return {number: position | {"rows": [*self._rows[number][0]]} for number, position in self._positions.items()}


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the rows of one stream, number `number`; the other attributes are as the arguments of StreamedBatches."""

    number: int
    stream: DocumentStream
    tokenizer: Tokenizer
    packer: Packer
    length: int
    buffer: int
    seed: int
    transform: Transform | None

    def read(self, position: Position) -> Iterator[tuple[Row, Position]]:
        """Each row after a position, with the position after it."""
        # A thread reads and packs the next window during the steps of this one.
        windows, first = self._windows(position), position["row"]
        pool = ThreadPoolExecutor(1)
        try:
            coming = pool.submit(next, windows)
            while True:
                window, coming = coming.result(), pool.submit(next, windows)
                key = (self.seed, window.epoch, self.number, window.number)
                about = {"epoch": window.epoch, "buffer": window.buffer, "window": window.number}
                order = np.random.default_rng(np.random.SeedSequence(key)).permutation(len(window.rows))
                for i, number in enumerate(order[first:].tolist(), start=first + 1):
                    row = window.rows[number]
                    row = self.transform(row, *key, number) if self.transform else row
                    yield row, about | {"row": i, "stream": window.position}
                first = 0
        finally:
            # Do not wait: this may run anywhere, when the iterator is garbage-collected.
            pool.shutdown(wait=False, cancel_futures=True)

    def _windows(self, position: Position) -> Iterator[_Window]:
        # Go back to the start of the buffer, and skip the windows that were used.
        epoch, wanted, before = position["epoch"], position["window"], position["stream"]
        number = position["buffer"]
        if before is not None:
            self.stream.restore(before)
        while True:
            documents = self.stream.documents(epoch)
            while buffer := self._fill(documents, epoch, number):
                first, left = number, iter(buffer)
                while texts := _take(left, _WINDOW):
                    if number >= wanted:
                        yield _Window(epoch, number, first, before, self._pack(texts))
                    number += 1
                before = self.stream.state()
            if not number:
                raise InputError("the stream has no text in its training split: check --config.data.text_column")
            epoch, number, wanted, before = epoch + 1, 0, 0, None

    def _fill(self, documents: Iterator[str], epoch: int, number: int) -> list[str]:
        """The next documents in the order of use; empty at the end."""
        if not self.buffer:
            return _take(documents, _WINDOW)
        draw = lambda what: np.random.default_rng((self.seed, epoch, self.number, number, what))
        size = self.buffer
        if epoch and not number:
            # Buffers start at different documents in each epoch, so that the same documents are not always together.
            size = int(draw(_OF_SIZES).uniform(0.5, 1) * size)
        texts = _take(documents, max(size, 1))
        return [texts[i] for i in draw(_OF_DOCUMENTS).permutation(len(texts))]

    def _pack(self, texts: list[str]) -> Rows:
        store = encode_in_memory([piece for text in texts for piece in cut(text)], self.tokenizer)
        return self.packer(store, self.length, self.tokenizer.begin)


def _take(documents: Iterator[str], size: int) -> list[str]:
    """The next documents that have text, about `size` characters in all; empty at the end."""
    texts, taken = [], 0
    for text in documents:
        texts += [text] if text.strip() else []
        taken += len(text)
        if taken >= size and texts:
            break
    return texts
