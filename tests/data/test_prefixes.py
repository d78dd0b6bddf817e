"""The prefix of a row in prefix language modelling."""

import numpy as np
import pytest

from flash_lm.data.examples import ExampleRows
from flash_lm.data.packing import empty_row
from flash_lm.data.prefixes import example_prefix, random_prefixes
from flash_lm.data.synthetic.copying import copying
from flash_lm.errors import InputError

SIZES = (1, 2, 9, 4)  # of the documents; padding follows the second one and the last


def row() -> dict[str, np.ndarray]:
    actual = empty_row(24)
    actual["segment_ids_BxL"][:16] = [1, 2, 2, *[3] * 9, *[4] * 4]
    actual["segment_ids_BxL"] = np.insert(actual["segment_ids_BxL"], 3, [0, 0])[:24]
    actual["loss_mask_BxL"] = (actual["segment_ids_BxL"] > 0).astype(np.float32)
    return actual


@pytest.mark.parametrize("key", [(0, 0), (3, 1, 7)])
def test_each_document_is_split_once(key):
    before, after = row(), random_prefixes(row(), *key)
    ids = before["segment_ids_BxL"]
    for number, size in enumerate(SIZES, start=1):
        prefix, mask = (after[name][ids == number] for name in ("prefix_BxL", "loss_mask_BxL"))
        assert len(prefix) == size and len(set(prefix.tolist())) == 1
        assert 1 <= prefix[0] <= size
        # The last token of the prefix predicts the one after it; earlier ones predict nothing.
        np.testing.assert_array_equal(mask, [0] * (prefix[0] - 1) + [1] * (size - prefix[0] + 1))
    assert not after["prefix_BxL"][ids == 0].any() and not after["loss_mask_BxL"][ids == 0].any()
    for name in before.keys() - {"loss_mask_BxL"}:
        np.testing.assert_array_equal(before[name], after[name])


def test_the_split_depends_on_the_key_and_all_splits_occur():
    lengths = [int(random_prefixes(row(), 0, epoch, 5)["prefix_BxL"][5]) for epoch in range(200)]
    assert lengths == [int(random_prefixes(row(), 0, epoch, 5)["prefix_BxL"][5]) for epoch in range(200)]
    assert set(lengths) == set(range(1, 10))
    counts = np.bincount(lengths)[1:]
    assert counts.min() > 200 / 9 / 2, "each of nine lengths about as often"


def test_no_targets_are_added():
    """The begin-of-text after a document is never a target."""
    without = row()
    without["loss_mask_BxL"][:] = 0
    assert not random_prefixes(without, 1)["loss_mask_BxL"].any()


def test_the_prompt_of_an_example_is_its_prefix():
    corpus = copying()
    rows = ExampleRows(corpus.splits["test"], 11, corpus.tokenizer.begin)
    actual = example_prefix(rows[0], 0)
    word = np.flatnonzero(actual["inputs_BxL"] == corpus.tokenizer.begin)[1]  # where the second copy begins
    assert set(actual["prefix_BxL"].tolist()) == {word + 1}
    np.testing.assert_array_equal(actual["loss_mask_BxL"], rows[0]["loss_mask_BxL"])


def test_examples_without_a_prompt_have_no_prefix():
    corpus = copying()
    row = ExampleRows(corpus.splits["test"], 11, corpus.tokenizer.begin)[0]
    row["loss_mask_BxL"][:] = 1
    with pytest.raises(InputError, match="task=prefix_lm needs examples with a first part that is given"):
        example_prefix(row, 0)
