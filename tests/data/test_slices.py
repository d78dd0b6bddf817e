"""Slices of a split: targets that need in-context recall, checked by hand, and parts of synthetic data."""

import numpy as np
import pytest

from flash_lm.data.corpus import Piece
from flash_lm.data.packing import StreamRows, empty_row
from flash_lm.data.slices import (
    Recalled,
    SlicedRows,
    Slices,
    SomeRows,
    position_slices,
    rare_pairs,
    recall_slices,
)
from flash_lm.data.token_cache import TokenizedCorpus
from flash_lm.data.tokenized_text import TokenizedText, encode_in_memory
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.errors import InputError


def text(*tokens: int) -> TokenizedText:
    return TokenizedText(np.array(tokens, np.uint16), np.array([0, len(tokens)]), 0, 0, 0)


def row(tokens, segments=None):
    arrays, count = empty_row(len(tokens) - 1), len(tokens) - 1
    arrays["inputs_BxL"][:], arrays["targets_BxL"][:] = tokens[:-1], tokens[1:]
    arrays["segment_ids_BxL"][:] = segments or [1] * count
    arrays["loss_mask_BxL"][:] = 1
    return arrays


def test_a_pair_that_occurred_in_the_row_and_is_rare_in_training():
    train = text(5, 6, 5, 6, 5, 6, 7, 8)  # 5 6 three times, 6 5 twice, the others once
    tokens = [7, 8, 5, 6, 7, 8, 5, 6, 7, 8]
    assert Recalled(train, rare=2)(row(tokens)).tolist() == [
        False,  # 7 8, first time
        False,  # 8 5
        False,  # 5 6
        False,  # 6 7
        True,  # 7 8 again, once in training
        True,  # 8 5 again, never in training
        False,  # 5 6 again, but three times in training
        True,  # 6 7 again
        True,  # 7 8, the third time
    ]
    assert Recalled(train, rare=3)(row(tokens))[6]
    assert Recalled(train, rare=0)(row(tokens)).tolist() == [False] * 5 + [True] + [False] * 3


def test_another_document_of_the_row_does_not_count():
    actual = Recalled(text(1, 2), rare=9)(row([7, 8, 7, 8, 7, 8], [1, 1, 2, 2, 2]))
    assert actual.tolist() == [False, False, False, False, True]


def test_words_that_training_lacks_make_no_frequent_pair():
    """In base 9, the pair 0 9, whose 9 is not in training, would have the number of 1 0."""
    train = text(1, 0, 1, 0, 1, 0, 8)
    assert Recalled(train, rare=1)(row([0, 9, 0, 9])).tolist() == [False, False, True]


def test_the_bound_is_proportional_to_the_published_one():
    assert rare_pairs(text(*range(100))) == 1
    assert rare_pairs(TokenizedText(np.zeros(24_000_000, np.uint8), np.array([0]), 0, 0, 0)) == 3


def test_every_target_is_in_one_slice():
    train, test = (
        encode_in_memory([Piece(x, True)], ByteTokenizer())
        for x in ("a naïve tree, a quick tree", "the cat sees the dog and the cat hears the dog " * 3)
    )
    rows = StreamRows(test, 40, ByteTokenizer.begin)
    corpus = TokenizedCorpus("x", "", ByteTokenizer(), {"train": train, "test": test}, None)
    sliced = SlicedRows(rows, recall_slices(corpus, "test", rare=2)(rows))
    assert [*sliced.names] == ["recall", "rest"] and len(sliced) == len(rows)
    masks = [sliced[i]["slices_BxKxL"] for i in range(len(rows))]
    assert all(x.shape == (2, 40) and (x.sum(axis=0) == 1).all() for x in masks)
    assert sum(x[0].sum() for x in masks) > 0
    assert (sliced[0]["loss_mask_BxL"] == rows[0]["loss_mask_BxL"]).all()


def test_slices_by_position_double_and_end_with_the_row():
    slices = position_slices(None, "test", None)  # pyright: ignore[reportArgumentType]
    names = lambda length: [*slices([row(range(length + 1))]).names]
    assert names(40) == ["0–39"] and names(64) == ["0–63"] and names(100) == ["0–63", "64–99"]
    assert names(512) == ["0–63", "64–127", "128–255", "256–511"]
    document = row(range(101))  # two documents of 70 and 30 tokens
    document["positions_BxL"][:] = [*range(70), *range(30)]
    first, second = SlicedRows([document], slices([document]))[0]["slices_BxKxL"]
    assert second.nonzero()[0].tolist() == [*range(64, 70)] and (first ^ second).all()


def test_views_of_rows():
    rows = [row([i, i + 1]) for i in range(9)]
    assert [SomeRows(rows, range(3, 6))[i]["inputs_BxL"].tolist() for i in range(3)] == [[3], [4], [5]]
    halves = SlicedRows(
        rows, Slices(["odd", "even"], lambda number, _: np.array([[number % 2 == 1], [number % 2 == 0]]))
    )
    assert len(halves) == 9 and halves[3]["slices_BxKxL"].tolist() == [[True], [False]]


def test_a_stream_has_no_pairs_to_count():
    corpus = TokenizedCorpus("x", "", ByteTokenizer(), {"test": text(1, 2)}, None)
    with pytest.raises(InputError, match="--slices=recall counts pairs of tokens in the training split"):
        recall_slices(corpus, "test", None)
