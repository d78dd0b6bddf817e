"""Streaming: batches of a corpus that is read during training, with a shuffle buffer.

The stream is read in buffers of many documents, which are shuffled. A buffer is used in windows of some megabytes. Each
window is tokenised and packed like a small corpus, with its rows in random order. The saved position is the start of
the buffer, the number of windows since then, and the number of rows used; a resumed run reads the buffer again and
continues exactly.
"""

from collections.abc import Iterator
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


class _Window(NamedTuple):
    epoch: int
    number: int  # within its epoch
    buffer: int  # number of the first window of its buffer
    position: dict[str, Any] | None  # position of the stream before the buffer; None: the epoch's start
    rows: Rows


class StreamedBatches:
    """Endless batches of a stream, whose end is the end of an epoch. Only the last row of a window may have padding."""

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
        position: dict[str, Any] | None = None,
        transform: Transform | None = None,
    ):
        """Starts at a saved position.

        Args:
            stream: all hosts' documents.
            tokenizer: tokenizer of the text.
            packer: packs a window's tokens into rows.
            length: L.
            share: this host's share; each group of hosts reads its part of the documents.
            buffer: characters of text whose documents are shuffled together; 0: documents stay in order.
            seed: seed of the orders of documents and rows.
            position: a position from `state`; None: the beginning.
            transform: makes the final row from a packed one, seed, epoch, group of hosts, window and row number.
        """
        self._stream = stream.share(share.group, share.groups)
        self._tokenizer, self._packer, self._length, self._buffer = tokenizer, packer, length, buffer
        self._batch_size, self._seed, self._group, self._transform = len(share.rows), seed, share.group, transform
        self._position = position or {"epoch": 0, "buffer": 0, "window": 0, "row": 0, "stream": None}
        self._rows = self._all_rows(dict(self._position))

    def __iter__(self) -> Iterator[Batch]:
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """This host's rows of the next batch, a dict of arrays of L columns."""
        rows = []
        for _ in range(self._batch_size):
            row, self._position = next(self._rows)
            rows.append(row)
        return stack(rows)

    def state(self) -> dict[str, Any]:
        """The position after the last batch, as JSON."""
        return self._position

    def _all_rows(self, position: dict[str, Any]) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Each row with the position after it."""
        # A thread reads and packs the next window during the steps of this one.
        windows, first = self._windows(position), position["row"]
        pool = ThreadPoolExecutor(1)
        try:
            coming = pool.submit(next, windows)
            while True:
                window, coming = coming.result(), pool.submit(next, windows)
                key = (self._seed, window.epoch, self._group, window.number)
                about = {"epoch": window.epoch, "buffer": window.buffer, "window": window.number}
                order = np.random.default_rng(np.random.SeedSequence(key)).permutation(len(window.rows))
                for i, number in enumerate(order[first:].tolist(), start=first + 1):
                    row = window.rows[number]
                    row = self._transform(row, *key, number) if self._transform else row
                    yield row, about | {"row": i, "stream": window.position}
                first = 0
        finally:
            # Do not wait: this may run anywhere, when the iterator is garbage-collected.
            pool.shutdown(wait=False, cancel_futures=True)

    def _windows(self, position: dict[str, Any]) -> Iterator[_Window]:
        # Go back to the start of the buffer, and skip the windows that were used.
        epoch, wanted, before = position["epoch"], position["window"], position["stream"]
        number = position["buffer"]
        if before is not None:
            self._stream.restore(before)
        while True:
            documents = self._stream.documents(epoch)
            while buffer := self._fill(documents, epoch, number):
                first, left = number, iter(buffer)
                while texts := _take(left, _WINDOW):
                    if number >= wanted:
                        yield _Window(epoch, number, first, before, self._pack(texts))
                    number += 1
                before = self._stream.state()
            if not number:
                raise InputError("the stream has no text in its training split: check --config.data.text_column")
            epoch, number, wanted, before = epoch + 1, 0, 0, None

    def _fill(self, documents: Iterator[str], epoch: int, number: int) -> list[str]:
        """The next documents in the order of use; empty at the end."""
        if not self._buffer:
            return _take(documents, _WINDOW)
        draw = lambda what: np.random.default_rng((self._seed, epoch, self._group, number, what))
        size = self._buffer
        if epoch and not number:
            # Buffers start at different documents in each epoch, so that the same documents are not always together.
            size = int(draw(_OF_SIZES).uniform(0.5, 1) * size)
        texts = _take(documents, max(size, 1))
        return [texts[i] for i in draw(_OF_DOCUMENTS).permutation(len(texts))]

    def _pack(self, texts: list[str]) -> Rows:
        store = encode_in_memory([piece for text in texts for piece in cut(text)], self._tokenizer)
        return self._packer(store, self._length, self._tokenizer.begin)


def _take(documents: Iterator[str], size: int) -> list[str]:
    """The next documents that have text, about `size` characters in all; empty at the end."""
    texts, taken = [], 0
    for text in documents:
        texts += [text] if text.strip() else []
        taken += len(text)
        if taken >= size and texts:
            break
    return texts
