"""Packing loses nothing: each token except begin-of-text is a target once, after the tokens before it."""

import itertools

import numpy as np
import pytest

from flash_lm.data.corpus import Piece
from flash_lm.data.packing import PACKERS, empty_row
from flash_lm.data.tokenized_text import TokenizedText, encode_in_memory
from flash_lm.data.tokenizer import ByteTokenizer

BEGIN, END = 1, 2


def store(sizes, seed=0) -> TokenizedText:
    """Documents of these sizes; all other tokens are different, and so identify a document."""
    fresh = iter(np.random.default_rng(seed).permutation(np.arange(10, 10 + sum(sizes))).tolist())
    documents = [[BEGIN, *(next(fresh) for _ in range(size)), END] for size in sizes]
    tokens = np.array([token for document in documents for token in document], np.uint16)
    return TokenizedText(tokens, np.cumsum([0, *map(len, documents)]), 0, 0, 0)


def test_lines_are_counted_whether_or_not_they_end():
    """In each document, also in one of several pieces; the last line needs no line end."""
    documents = [["a b\n", "c\n"], ["d"], ["e\nf", "g\n", "h"]]
    pieces = [Piece(text, begins_document=i == 0) for document in documents for i, text in enumerate(document)]
    actual = encode_in_memory(pieces, ByteTokenizer())
    assert actual.lines == 2 + 1 + 3 and actual.bytes == 6 + 1 + 6


CASES = {
    "short documents": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5],
    "one long document": [101],
    "mixed": [1, 50, 7, 16, 15, 14, 33, 2, 2, 2, 8],
    "exact rows": [15, 15, 15],
    "one token": [1],
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("pack", PACKERS)
def test_every_token_is_predicted_once_from_the_one_before(pack, sizes):
    tokens = store(sizes)
    rows = PACKERS[pack](tokens, 16, BEGIN)
    seen = []
    for row in (rows[i] for i in range(len(rows))):
        assert {name: x.shape for name, x in row.items()} == dict.fromkeys(empty_row(16), (16,))
        mask = row["loss_mask_BxL"] > 0
        seen += list(zip(row["inputs_BxL"][mask].tolist(), row["targets_BxL"][mask].tolist(), strict=True))
        assert not mask[row["segment_ids_BxL"] == 0].any()
    pairs = list(zip(tokens.tokens[:-1].tolist(), tokens.tokens[1:].tolist(), strict=True))
    assert sorted(seen) == sorted(pair for pair in pairs if pair[1] != BEGIN)


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("pack", PACKERS)
def test_segments_are_contiguous_and_have_separate_positions(pack, sizes):
    rows = PACKERS[pack](store(sizes), 16, BEGIN)
    for row in (rows[i] for i in range(len(rows))):
        ids, positions = row["segment_ids_BxL"], row["positions_BxL"]
        runs = [run for run in np.split(np.arange(16), np.flatnonzero(np.diff(ids)) + 1) if ids[run[0]]]
        assert len({ids[run[0]] for run in runs}) == len(runs)
        for run in runs:
            assert positions[run].tolist() == list(range(len(run)))


def test_documents_are_isolated():
    tokens = store(CASES["mixed"])
    owner = {int(t): i for i, (a, b) in enumerate(itertools.pairwise(tokens.starts)) for t in tokens.tokens[a:b]}
    rows = PACKERS["documents"](tokens, 16, BEGIN)
    for row in (rows[i] for i in range(len(rows))):
        for segment in set(row["segment_ids_BxL"].tolist()) - {0}:
            inputs = row["inputs_BxL"][row["segment_ids_BxL"] == segment]
            assert len({owner[int(token)] for token in inputs if token > END}) <= 1


def test_streams_are_full_and_documents_are_packed_tightly():
    tokens = store(np.random.default_rng(0).integers(1, 40, 2000).tolist())
    stream, documents = (PACKERS[pack](tokens, 64, BEGIN) for pack in ("stream", "documents"))
    predictions = len(tokens.tokens) - len(tokens.starts) + 1
    assert len(stream) == -(-(len(tokens.tokens) - 1) // 64)
    assert predictions / (len(documents) * 64) > 0.97
