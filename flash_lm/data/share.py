"""Host sharding of batches; without grain, which benchmarks on a GPU machine may lack."""

from collections.abc import Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """The rows of each batch that one host reads.

    Attributes:
        batch_size: B, over all hosts.
        rows: indices of this host's rows in the batch, ascending.
        groups: number of different shares that the hosts have, at most B; hosts of one group read the same rows.
        order: all rows of the batch, those of one group after those of another; empty: ascending.
    """

    batch_size: int
    rows: Sequence[int]
    groups: int = 1
    order: Sequence[int] = ()


def single_host_share(batch_size: int) -> Share:
    """The share of a single host."""
    return Share(batch_size, range(batch_size))
