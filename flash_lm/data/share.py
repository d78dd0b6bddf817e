"""What one of several hosts reads of a batch."""

from collections.abc import Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """What one host reads of each batch.

    Attributes:
        batch_size: B, over all hosts.
        rows: numbers of its rows in the batch, ascending.
        group: its number among the groups of hosts that read the same rows.
        groups: of them.
    """

    batch_size: int
    rows: Sequence[int]
    group: int = 0
    groups: int = 1


def whole_batch(batch_size: int) -> Share:
    """The share of a single host."""
    return Share(batch_size, range(batch_size))
