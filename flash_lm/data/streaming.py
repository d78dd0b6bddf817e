"""Batches of a corpus that is read while training goes on.

The stream is taken in windows of some megabytes, each tokenised and packed as a small corpus of its own, its rows in
random order. The place is that of the window's start and the number of rows used, so a resumed run goes on exactly.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from flash_lm.data.corpus import DocumentStream, cut
from flash_lm.data.loader import Batch, Transform, stack
from flash_lm.data.packing import Packer, Row, Rows
from flash_lm.data.token_store import encode_in_memory
from flash_lm.data.tokenizers import Tokenizer
from flash_lm.errors import InputError

_WINDOW = 4 << 20  # characters of text


class _Window(NamedTuple):
    epoch: int
    number: int  # in its epoch
    place: dict[str, Any] | None  # of the stream, before the window; None: the epoch's start
    rows: Rows


class StreamedBatches:
    """Batches without end; an epoch ends with the stream. Only the last row of a window may have padding."""

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Tokenizer,
        packer: Packer,
        length: int,
        batch_size: int,
        *,
        seed: int,
        place: dict[str, Any] | None = None,
        host: int = 0,
        hosts: int = 1,
        transform: Transform | None = None,
    ):
        """Starts at a place.

        Args:
            stream: of all hosts' documents.
            tokenizer: of the text.
            packer: of a window's tokens into rows.
            length: L.
            batch_size: B, over all hosts; divisible by `hosts`.
            seed: of the order in each window.
            place: of `state`; None: the beginning.
            host: number of this process.
            hosts: number of processes; each reads its share of the documents.
            transform: makes the rows, given seed, epoch, host, window and row number.
        """
        self._stream = stream.share(host, hosts)
        self._tokenizer, self._packer, self._length = tokenizer, packer, length
        self._batch_size, self._seed, self._host, self._transform = batch_size // hosts, seed, host, transform
        self._place = place or {"epoch": 0, "window": 0, "row": 0, "stream": None}
        self._rows = self._all_rows(dict(self._place))

    def __iter__(self) -> Iterator[Batch]:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch, a dict of (B / hosts)×L arrays."""
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
                key = (self._seed, window.epoch, self._host, window.number)
                order = np.random.default_rng(np.random.SeedSequence(key)).permutation(len(window.rows))
                for i, number in enumerate(order[first:].tolist(), start=first + 1):
                    row = window.rows[number]
                    row = self._transform(row, *key, number) if self._transform else row
                    yield row, {"epoch": window.epoch, "window": window.number, "row": i, "stream": window.place}
                first = 0
        finally:
            # Without waiting: this may run anywhere, when the iterator is collected as garbage.
            pool.shutdown(wait=False, cancel_futures=True)

    def _windows(self, place: dict[str, Any]) -> Iterator[_Window]:
        epoch, number, before = place["epoch"], place["window"], place["stream"]
        if before is not None:
            self._stream.restore(before)
        while True:
            documents = self._stream.documents(epoch)
            while pieces := _take(documents):
                store = encode_in_memory(pieces, self._tokenizer)
                yield _Window(epoch, number, before, self._packer(store, self._length, self._tokenizer.begin))
                number, before = number + 1, self._stream.state()
            if not number:
                raise InputError("the stream has no text in its training split: check --config.data.text_column")
            epoch, number, before = epoch + 1, 0, None


def _take(documents: Iterator[str]) -> list:
    """Pieces of the next documents, about a window; none at the end."""
    pieces, size = [], 0
    for text in documents:
        pieces.extend(cut(text))
        size += len(text)
        if size >= _WINDOW and pieces:
            break
    return pieces
