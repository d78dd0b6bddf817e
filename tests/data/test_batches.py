"""The data order is a pure function of (seed, step), and each row is read once per epoch."""

import itertools

import numpy as np
import pytest

from flash_lm.data.batches import IndexedBatches, evaluation_batches
from flash_lm.data.share import Share, single_host_share


class Numbers:
    """Rows that hold their index."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int):
        if not 0 <= i < self.count:
            raise IndexError(i)
        return {"x": np.full(3, i + 1)}


def rows(batches, count) -> list[list[int]]:
    return [batch["x"][:, 0].tolist() for batch in itertools.islice(batches, count)]


def test_each_epoch_has_each_row_once_in_another_order():
    # 10 rows in batches of 4: an epoch ends in the middle of a batch.
    flat = sum(rows(IndexedBatches(Numbers(10), single_host_share(4), seed=0, start_step=0), 5), [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(1, 11))
    assert flat[:10] != flat[10:]
    assert flat[:10] != list(range(1, 11))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7])
def test_batches_of_any_size(batch_size):
    flat = sum(
        rows(IndexedBatches(Numbers(10), single_host_share(batch_size), seed=0, start_step=0), 20 // batch_size + 1), []
    )
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(1, 11))


def test_resuming_needs_only_the_step():
    full = rows(IndexedBatches(Numbers(10), single_host_share(4), seed=3, start_step=0), 12)
    for start in range(8):
        assert (
            rows(IndexedBatches(Numbers(10), single_host_share(4), seed=3, start_step=start), 4)
            == full[start : start + 4]
        )
    assert rows(IndexedBatches(Numbers(10), single_host_share(4), seed=4, start_step=0), 12) != full


@pytest.mark.parametrize("shares", [[(0, 1), (2, 3)], [(0, 3), (1, 2)], [(2,), (0,), (3,), (1,)]], ids=str)
def test_hosts_share_each_batch(shares):
    """Whichever rows a host has, its part of the batch is the same."""
    full = rows(IndexedBatches(Numbers(10), single_host_share(4), seed=3, start_step=2), 6)
    parts = [rows(IndexedBatches(Numbers(10), Share(4, mine), seed=3, start_step=2), 6) for mine in shares]
    for step, batch in enumerate(full):
        for mine, part in zip(shares, parts, strict=True):
            assert part[step] == [batch[row] for row in mine]


@pytest.mark.parametrize("shares", [[(0, 1, 2, 3)], [(0, 3), (1, 2)]], ids=str)
def test_evaluation_has_each_row_once_and_pads_the_last_batch(shares):
    flat = []
    for mine in shares:
        batches = list(evaluation_batches(Numbers(10), Share(4, mine)))
        assert all(batch["x"].shape == (len(mine), 3) for batch in batches)
        flat += sum(rows(batches, 99), [])
    assert sorted(flat) == [0, 0, *range(1, 11)]


@pytest.mark.parametrize(("limit", "starts"), [(1, [1]), (2, [1, 49]), (3, [1, 33, 65]), (24, None), (30, None)])
def test_a_limited_evaluation_is_spread_over_the_split(limit, starts):
    """A split may be sorted by label; its 96 rows are 24 batches."""
    batches = [batch[0] for batch in rows(evaluation_batches(Numbers(96), single_host_share(4), limit=limit), 99)]
    assert batches == (starts or list(range(1, 97, 4)))


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_rows_of_an_evaluation_do_not_depend_on_how_a_batch_is_split(limit):
    """90 rows in batches of 8 are 11 batches and a part of one; a limit counts full batches."""
    full = sum(rows(evaluation_batches(Numbers(90), single_host_share(8), limit=limit), 99), [])
    for parts in (2, 4):
        batches = sum(rows(evaluation_batches(Numbers(90), single_host_share(8 // parts), limit, parts), 99), [])
        assert [row for row in batches if row] == [row for row in full if row]
