"""Batches of rows. The training order is a pure function of (seed, step), whatever the number of hosts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from flash_lm.data.packing import Row, Rows

Batch = dict[str, np.ndarray]
Transform = Callable[..., Row]  # of a row and the numbers that it is a pure function of

_PREFETCH = 4  # batches that a thread makes ahead of the device
_ENDLESS = 1 << 50  # steps: grain divides the number of rows by that of a batch as floats, which then are exact


class IndexedBatches:
    """Batches of rows that can be had by number, without end, in a new order each epoch.

    Rows are numbered over all epochs, and step i has rows i·B … (i+1)·B − 1: no row is left out or repeated where an
    epoch ends, and to resume needs a step alone. Each host reads its contiguous share of them, so that together they
    place the batch that one host would.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        *,
        seed: int,
        start_step: int,
        host: int = 0,
        hosts: int = 1,
        transform: Transform | None = None,
    ):
        """Starts at a step.

        Args:
            rows: of the training split.
            batch_size: B, over all hosts; divisible by `hosts`.
            seed: of the order.
            start_step: of the first batch.
            host: number of this process.
            hosts: number of processes.
            transform: makes the rows, given seed, epoch and the row's number.
        """

        def make(i: int, number: int) -> Row:
            row = rows[number]
            return transform(row, seed, i // len(rows), number) if transform else row

        order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat().map_with_index(make)
        share = batch_size // hosts
        mine = _Share(order, host * share, share, batch_size).batch(share, batch_fn=stack)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
        self._batches = iter(mine[start_step:].to_iter_dataset(options))

    def __iter__(self) -> Iterator[Batch]:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch, a dict of (B / hosts)×L arrays."""
        return next(self._batches)

    def state(self) -> None:
        """Nothing: the step says it all."""


class _Share(grain.MapDataset):
    """Of each `size` elements the `share` ones from `first` on."""

    def __init__(self, parent: grain.MapDataset, first: int, share: int, size: int):
        super().__init__(parent)
        self._first, self._share, self._size = first, share, size

    def __len__(self) -> int:
        return min(len(self._parent) // self._size, _ENDLESS) * self._share

    def __getitem__(self, i: int) -> Any:
        return self._parent[i // self._share * self._size + self._first + i % self._share]


def evaluation_batches(
    rows: Rows, batch_size: int, *, limit: int = 0, host: int = 0, hosts: int = 1
) -> Iterator[Batch]:
    """Every row once, in order; the last batch is filled up with padding.

    Args:
        rows: of a split.
        batch_size: B, over all hosts; divisible by `hosts`.
        limit: number of batches; 0 = all.
        host: number of this process.
        hosts: number of processes.

    Yields:
        Dicts of (B / hosts)×L arrays.
    """
    batches = -(-len(rows) // batch_size)
    padding = {name: np.zeros_like(x) for name, x in rows[0].items()}
    for i in range(min(batches, limit) if limit else batches):
        share = batch_size // hosts
        numbers = range(i * batch_size + host * share, i * batch_size + (host + 1) * share)
        yield stack([rows[n] if n < len(rows) else padding for n in numbers])


def stack(rows: Sequence[Row]) -> Batch:
    """Rows as a batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
