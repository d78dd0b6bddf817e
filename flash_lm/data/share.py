"""Host sharding of batches; without grain, which benchmarks on a GPU machine may lack."""

from collections.abc import Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """The rows of each batch that one host reads.

    Attributes:
        batch_size: B, over all hosts.
        rows: indices of this host's rows in the batch, ascending.
        group: index of this host's group; the hosts of a group read the same rows.
        groups: number of groups.
    """

    batch_size: int
    rows: Sequence[int]
    group: int = 0
    groups: int = 1


def single_host_share(batch_size: int) -> Share:
    """The share of a single host."""
    return Share(batch_size, range(batch_size))
