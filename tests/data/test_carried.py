"""Streams of documents: each document once per epoch, in rows that continue, in an order that needs only the step."""

import itertools

import numpy as np
import pytest

from flash_lm.data.carried import CarriedBatches, carried_once
from flash_lm.data.share import Share, single_host_share
from flash_lm.data.tokenized_text import TokenizedText

LENGTH, BEGIN, END = 8, 1, 2
SIZES = (3, 40, 17, 9, 8, 2, 26, 16)  # tokens per document, with begin and end


def text(sizes=SIZES) -> TokenizedText:
    """Tokens that are all different, except begin and end."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.arange(10, 10 + starts[-1])
    tokens[starts[:-1]], tokens[starts[1:] - 1] = BEGIN, END
    return TokenizedText(tokens.astype(np.uint16), starts, 1, 1, 1)


def read(batches) -> list[list[int]]:
    """The inputs of the documents, in the order of their ends; checks that rows continue."""
    documents, open_documents = [], {}
    for batch in batches:
        for stream, (inputs, targets, mask, segments, positions) in enumerate(
            zip(
                *(batch[f"{name}_BxL"] for name in ("inputs", "targets", "loss_mask", "segment_ids", "positions")),
                strict=True,
            )
        ):
            count = int(segments.sum())
            assert segments.tolist() == mask.tolist() == [1] * count + [0] * (LENGTH - count)
            if not count:
                continue
            so_far = open_documents.setdefault(stream, [])
            assert positions[:count].tolist() == list(range(len(so_far), len(so_far) + count))
            assert (targets[: count - 1] == inputs[1:count]).all()
            so_far.extend(inputs[:count].tolist())
            if targets[count - 1] == END:
                documents.append(open_documents.pop(stream))
            else:
                assert count == LENGTH, "a row that is not full ends its document"
    return documents


def get_inputs(store: TokenizedText) -> list[list[int]]:
    return [store.tokens[a : b - 1].tolist() for a, b in itertools.pairwise(store.starts)]


@pytest.mark.parametrize("streams", [1, 3, 8, 11])
def test_every_document_once(streams):
    assert sorted(read(carried_once(text(), LENGTH, single_host_share(streams)))) == sorted(get_inputs(text()))


def count_rows(sizes=SIZES) -> int:
    return sum(-(-(size - 1) // LENGTH) for size in sizes)


@pytest.mark.parametrize("streams", [1, 3])
def test_each_epoch_has_each_document_once_in_another_order(streams):
    batches = 3 * (count_rows() + 40) // streams
    actual = read(itertools.islice(CarriedBatches(text(), LENGTH, single_host_share(streams), seed=0), batches))
    expected, count = sorted(get_inputs(text())), len(SIZES)
    if streams == 1:  # with more, documents of two epochs end in mixed order
        assert sorted(actual[:count]) == sorted(actual[count : 2 * count]) == expected
        assert actual[:count] != actual[count : 2 * count]
    assert all(actual.count(document) >= 2 for document in expected)


def test_the_order_depends_on_the_seed():
    first = [
        read(itertools.islice(CarriedBatches(text(), LENGTH, single_host_share(1), seed=s), 18)) for s in (0, 0, 1)
    ]
    assert first[0] == first[1] != first[2]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        for name in x:
            np.testing.assert_array_equal(x[name], y[name])


@pytest.mark.parametrize("start", [1, 5, 30])
def test_resuming_needs_only_the_step(start):
    full = list(itertools.islice(CarriedBatches(text(), LENGTH, single_host_share(3), seed=4), start + 6))
    again = CarriedBatches(text(), LENGTH, single_host_share(3), seed=4, start_step=start)
    assert_same(itertools.islice(again, 6), full[start:])


@pytest.mark.parametrize("shares", [[(0, 1), (2, 3)], [(0, 3), (1, 2)]], ids=str)
def test_hosts_share_each_batch(shares):
    full = list(itertools.islice(CarriedBatches(text(), LENGTH, single_host_share(4), seed=4), 20))
    for mine in shares:
        part = itertools.islice(CarriedBatches(text(), LENGTH, Share(4, mine), seed=4), 20)
        assert_same(part, [{name: x[list(mine)] for name, x in batch.items()} for batch in full])


def test_a_limit_ends_the_batches_early():
    assert len(list(carried_once(text(), LENGTH, single_host_share(2), limit=3))) == 3


def test_the_first_tokens_of_each_document():
    """In full rows: 20 tokens are three rows of 8."""
    documents = []
    for batch in carried_once(text(), LENGTH, single_host_share(1), first=20):
        documents.extend(batch["positions_BxL"][batch["segment_ids_BxL"] > 0].tolist())
    assert len(documents) == sum(min(size - 1, 24) for size in SIZES) and max(documents) == 23
