"""Batches of a corpus that is read while training goes on.

The stream is taken in buffers of many documents, whose order is drawn. A buffer is taken in windows of some megabytes,
each tokenised and packed as a small corpus of its own, its rows in random order. The place is that of the buffer's
start, the number of windows since, and that of rows used, so a resumed run reads a buffer again and goes on exactly.
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
from flash_lm.data.tokenizers import Tokenizer
from flash_lm.errors import InputError

_WINDOW = 4 << 20  # characters of text
_OF_DOCUMENTS, _OF_SIZES = 1, 2  # what is drawn, beside the order of the rows


class _Window(NamedTuple):
    epoch: int
    number: int  # in its epoch
    buffer: int  # number of the first window of its buffer
    place: dict[str, Any] | None  # of the stream, before the buffer; None: the epoch's start
    rows: Rows


class StreamedBatches:
    """Batches without end; an epoch ends with the stream. Only the last row of a window may have padding."""

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
        place: dict[str, Any] | None = None,
        transform: Transform | None = None,
    ):
        """Starts at a place.

        Args:
            stream: of all hosts' documents.
            tokenizer: of the text.
            packer: of a window's tokens into rows.
            length: L.
            share: of this host; each group of hosts reads its part of the documents.
            buffer: characters of text whose documents are put into random order; 0: they stay as they come.
            seed: of the orders of documents and rows.
            place: of `state`; None: the beginning.
            transform: makes the rows, given seed, epoch, group of hosts, window and row number.
        """
        self._stream = stream.share(share.group, share.groups)
        self._tokenizer, self._packer, self._length, self._buffer = tokenizer, packer, length, buffer
        self._batch_size, self._seed, self._group, self._transform = len(share.rows), seed, share.group, transform
        self._place = place or {"epoch": 0, "buffer": 0, "window": 0, "row": 0, "stream": None}
        self._rows = self._all_rows(dict(self._place))

    def __iter__(self) -> Iterator[Batch]:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """This host's rows of the next batch, a dict of arrays of L columns."""
        rows = []
        for _ in range(self._batch_size):
            row, self._place = next(self._rows)
            rows.append(row)
        return stack(rows)

    def state(self) -> dict[str, Any]:
        """The place after the last batch, as JSON."""
        return self._place

    def _all_rows(self, place: dict[str, Any]) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Each row with the place after it."""
        windows, first = self._windows(place), place["row"]
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
                    yield row, about | {"row": i, "stream": window.place}
                first = 0
        finally:
            # Without waiting: this may run anywhere, when the iterator is collected as garbage.
            pool.shutdown(wait=False, cancel_futures=True)

    def _windows(self, place: dict[str, Any]) -> Iterator[_Window]:
        epoch, wanted, before = place["epoch"], place["window"], place["stream"]
        number = place.get("buffer", wanted)  # places of older runs have no buffers: each window is one
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
        """The next documents in the order in which they are used; none at the end."""
        if not self._buffer:
            return _take(documents, _WINDOW)
        draw = lambda what: np.random.default_rng((self._seed, epoch, self._group, number, what))
        size = self._buffer
        if epoch and not number:
            # So that buffers begin elsewhere in each epoch, and not the same documents are always together.
            size = int(draw(_OF_SIZES).uniform(0.5, 1) * size)
        texts = _take(documents, max(size, 1))
        return [texts[i] for i in draw(_OF_DOCUMENTS).permutation(len(texts))]

    def _pack(self, texts: list[str]) -> Rows:
        store = encode_in_memory([piece for text in texts for piece in cut(text)], self._tokenizer)
        return self._packer(store, self._length, self._tokenizer.begin)


def _take(documents: Iterator[str], size: int) -> list[str]:
    """The next documents that have text, of about so many characters; none at the end."""
    texts, taken = [], 0
    for text in documents:
        texts += [text] if text.strip() else []
        taken += len(text)
        if taken >= size and texts:
            break
    return texts
