"""Shuffled batches with prefetch. The order is a pure function of (seed, step), whatever the number of hosts."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import grain
import numpy as np

from flash_lm.data.packing import Row, Rows
from flash_lm.data.share import Share

Batch = dict[str, np.ndarray]
Mixture = Sequence[tuple[range, float]]
Transform = Callable[..., Row]  # of a row and the numbers that determine the result

_PREFETCH = 4  # batches that a thread prepares ahead of the device
_ENDLESS = 1 << 50  # steps; small enough that grain's float division, rows / rows per batch, is exact


class IndexedBatches:
    """Endless batches indexed by step, shuffled anew each epoch; with a mixture, each part has a fixed share.

    Rows are numbered over all epochs, and step i has rows i·B … (i+1)·B − 1: no row is skipped or repeated at the end
    of an epoch, and the step alone is enough to resume. Each host reads its share of the rows, so that together the
    hosts form the same batch as a single host.
    """

    def __init__(
        self,
        rows: Rows,
        share: Share,
        *,
        seed: int,
        start_step: int,
        transform: Transform | None = None,
        mixture: Mixture = (),
    ):
        """Starts at a step.

        Args:
            rows: the rows of the training split.
            share: this host's share of each batch.
            seed: seed of the order.
            start_step: step of the first batch.
            transform: makes the final row from a packed one, seed, epoch and the row's number.
            mixture: numbers of the rows of each part, and its share of all rows; the parts are shuffled, and repeated
                in epochs, apart from each other. Empty: the rows have no parts.
        """

        # Shuffle each part by itself, so that the rows of one do not depend on how long the others are.
        def order(part: range, seed: int) -> grain.MapDataset:
            def make(i: int, number: int) -> Row:
                row = rows[number]
                return transform(row, seed, i // len(part), number) if transform else row

            return grain.MapDataset.range(part.start, part.stop).seed(seed).shuffle().repeat().map_with_index(make)

        if mixture:
            parts = [order(part, seed + number) for number, (part, _) in enumerate(mixture)]
            mixed = _Mixed(parts, [share for _, share in mixture])
        else:
            mixed = order(range(len(rows)), seed)
        # Each host reads only its rows of every batch; a thread prepares batches ahead of the device.
        mine = _Shared(mixed, share).batch(len(share.rows), batch_fn=stack)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
        self._batches = iter(mine[start_step:].to_iter_dataset(options))

    def __iter__(self) -> Iterator[Batch]:
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """This host's rows of the next batch, a dict of arrays of L columns."""
        return next(self._batches)

    def state(self) -> None:
        """None: the step is the only state."""


class FixedRows:
    """Rows for evaluation: a task's random choices are fixed, whatever the run's seed."""

    def __init__(self, rows: Rows, transform: Transform):
        """Makes each row on access."""
        self._rows, self._transform = rows, transform

    @property
    def ranges(self) -> list[range]:
        """Numbers of the rows of each part of a mixture."""
        rows: Any = self._rows
        return rows.ranges

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, row: int) -> Row:
        """The row with this number."""
        return self._transform(self._rows[row], row)


class _Mixed(grain.MapDataset):
    """Interleaves endless parts in fixed shares, without chance: of the first n elements each has its share, ± about 1.

    The first part gets its share of all, rounded to the nearest, the next one its share of those that are left, and so
    on. Shares are read as the decimal numbers that they are written as, so that no rounding adds up.
    """

    def __init__(self, parts: Sequence[grain.MapDataset], shares: Sequence[float]):
        super().__init__(parts)
        exact = [Fraction(str(share)) for share in shares]
        self._of_those_left = [share / sum(exact[part:]) for part, share in enumerate(exact)]

    def __len__(self) -> int:
        return min(map(len, self._parents))

    def __getitem__(self, i: int) -> Any:
        # Element i is in the first part whose rounded share grows at i; else count it among those left.
        for part, share in enumerate(self._of_those_left):
            before, after = (_nearest(n * share.numerator, share.denominator) for n in (i, i + 1))
            if after > before:
                return self._parents[part][before]
            i -= before
        raise AssertionError("the last part has all that is left")


def _nearest(a: int, b: int) -> int:
    """The integer nearest to a / b."""
    return (2 * a + b) // (2 * b)


class _Shared(grain.MapDataset):
    """One host's elements of each batch (host sharding)."""

    def __init__(self, parent: grain.MapDataset, share: Share):
        super().__init__(parent)
        self._size, self._rows = share.batch_size, share.rows

    def __len__(self) -> int:
        return min(len(self._parent) // self._size, _ENDLESS) * len(self._rows)

    def __getitem__(self, i: int) -> Any:
        batch, row = divmod(i, len(self._rows))
        return self._parent[batch * self._size + self._rows[row]]


def evaluation_batches(rows: Rows, share: Share, limit: int = 0, parts: int = 1) -> Iterator[Batch]:
    """Evaluation batches: every row once, in order, the last batch padded. With a limit, some of them, spread evenly.

    Args:
        rows: the rows of a split.
        share: this host's share of each batch.
        limit: number of batches, of `parts` shares each; 0 = all. The first ones alone could be of one kind: rows may
            be sorted by label.
        parts: shares that are counted as one batch, such as the microbatches of a step: which rows are read does not
            depend on how a batch is cut.

    Yields:
        This host's rows of each share, as dicts of arrays of L columns.
    """
    # All batches have the same shape, so the last one is padded with rows that are no target.
    padding = {name: np.zeros_like(x) for name, x in rows[0].items()}
    for batch in chosen_rows(len(rows), share.batch_size * parts, limit):
        for first in batch[:: share.batch_size]:
            numbers = (first + row for row in share.rows)
            yield stack([rows[n] if n < len(rows) else padding for n in numbers])


def chosen_rows(count: int, batch_size: int, limit: int = 0) -> list[range]:
    """The numbers of the rows of each batch that `evaluation_batches` reads.

    Args:
        count: number of rows of the split.
        batch_size: rows of a batch, over all hosts.
        limit: number of batches; 0 = all.
    """
    # The chosen batches start at even distances, the first one at row 0.
    batches = -(-count // batch_size)
    chosen = min(batches, limit) if limit else batches
    starts = (i * batches // chosen * batch_size for i in range(chosen))
    return [range(start, min(start + batch_size, count)) for start in starts]


def stack(rows: Sequence[Row]) -> Batch:
    """Stacks rows into a batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
