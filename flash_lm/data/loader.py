"""Batches of rows. The training order is a pure function of (seed, step), whatever the number of hosts."""

from collections.abc import Iterator, Sequence
from typing import cast

import grain
import numpy as np

from flash_lm.data.packing import DocumentRows, Row, StreamRows

Rows = StreamRows | DocumentRows
Batch = dict[str, np.ndarray]

_PREFETCH = 4  # batches that a thread makes ahead of the device


def training_batches(
    rows: Rows, batch_size: int, *, seed: int, start_step: int, host: int = 0, hosts: int = 1
) -> Iterator[Batch]:
    """Batches from `start_step` on, without end, in a new order each epoch.

    Rows are numbered over all epochs, and step i has rows i·B … (i+1)·B − 1: no row is left out or repeated where an
    epoch ends, and to resume needs a step alone. Host h takes every hosts-th of them from h on.

    Args:
        rows: of the training split.
        batch_size: B, over all hosts; divisible by `hosts`.
        seed: of the order.
        start_step: of the first batch.
        host: number of this process.
        hosts: number of processes.

    Yields:
        Dicts of (B / hosts)×L arrays.
    """
    order = grain.MapDataset.source(cast(Sequence[Row], rows)).seed(seed).shuffle().repeat()
    mine = order[host::hosts].batch(batch_size // hosts, batch_fn=_stack)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
    yield from mine[start_step:].to_iter_dataset(options)


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
        numbers = range(i * batch_size + host, (i + 1) * batch_size, hosts)
        yield _stack([rows[n] if n < len(rows) else padding for n in numbers])


def _stack(rows: Sequence[Row]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
