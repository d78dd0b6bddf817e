"""ListOps: values against another evaluator, the shape of the trees, and published statistics."""

import collections
import re

import numpy as np
import pytest

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.corpus import SPLITS
from flash_lm.data.labelled import LabelledRows
from flash_lm.data.splits import load_splits
from flash_lm.data.synthetic.listops import SYMBOLS
from flash_lm.errors import InputError


def make_corpus(length=256, **options):
    config = get_config()
    config.task, config.model.max_length = "classify", length
    config.data.update(corpus="listops", pack="examples", length=length, tokens_per_batch=length)
    config.data.listops.update(**{"longer_than": 20, "shorter_than": 200, "train": 300, "test": 300, **options})
    return load_splits(parse(config).data)


def evaluate(text: str) -> int:
    """By rewriting: the innermost operation is replaced by its value until one digit is left."""
    reckon = {
        "MIN": lambda xs: sorted(xs)[0],
        "MAX": lambda xs: sorted(xs)[-1],
        "MED": lambda xs: int(np.median(xs)),
        "SM": lambda xs: int(np.sum(xs) % 10),
    }
    while "[" in text:
        text = re.sub(
            r"\[(MIN|MAX|MED|SM)((?: \d)+) \]", lambda m: str(reckon[m[1]](list(map(int, m[2].split())))), text
        )
    return int(text)


def test_values_equal_those_of_another_evaluator():
    trees = make_corpus().splits["train"]
    for number in range(300):
        symbols, value = trees.tree(number)
        assert value == evaluate(" ".join(symbols))


def test_trees_respect_the_bounds():
    trees = make_corpus(depth=4, arguments=5).splits["train"]
    counts = collections.Counter()
    for number in range(300):
        symbols, _ = trees.tree(number)
        assert 20 < len(symbols) < 200 and set(symbols) <= set(SYMBOLS)
        open_nodes = []
        for symbol in symbols:
            if symbol == "]":
                counts[open_nodes.pop()] += 1
                continue
            if open_nodes:
                open_nodes[-1] += 1
            if symbol.startswith("["):
                open_nodes.append(0)
            assert len(open_nodes) < 4  # the fourth level has digits alone
        assert not open_nodes
    assert set(counts) == {2, 3, 4, 5}
    assert len(SYMBOLS) == 15


def test_a_row_has_the_tree_and_its_value():
    corpus = make_corpus()
    rows = LabelledRows(corpus.splits["test"], 256, corpus.tokenizer.begin)
    row, (symbols, value) = rows[5], corpus.splits["test"].tree(5)
    count = len(symbols) + 1
    assert row["inputs_BxL"][0] == corpus.tokenizer.begin and (row["segment_ids_BxL"] > 0).sum() == count
    letters = dict(zip(SYMBOLS, "0123456789nxms]", strict=True))
    assert corpus.tokenizer.decode(row["inputs_BxL"][1:count]) == "".join(letters[x] for x in symbols)
    assert np.flatnonzero(row["loss_mask_BxL"]).tolist() == [0] and corpus.labels[row["targets_BxL"][0]] == str(value)


def test_rows_differ_and_are_deterministic():
    texts = [" ".join(make_corpus().splits[split].tree(i)[0]) for split in SPLITS for i in range(30)]
    assert len(set(texts)) == len(texts)
    assert " ".join(make_corpus().splits["test"].tree(4)[0]) == texts[64]


@pytest.mark.slow("draws thousands of long trees")
def test_the_published_settings_have_the_published_statistics():
    """500 to 2000 symbols: the most frequent value has 17.4 % of the trees; half have less than 992 symbols."""
    trees = make_corpus(2048, longer_than=500, shorter_than=2000, train=2000).splits["train"]
    actual = [trees.tree(number) for number in range(2000)]
    values = np.bincount([value for _, value in actual])
    assert values.argmax() in (0, 9) and abs(values.max() / 2000 - 0.174) < 0.03
    assert abs(np.median([len(symbols) for symbols, _ in actual]) - 992) < 40


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"longer_than": 100, "shorter_than": 102}, "no tree has more than data.listops.longer_than=100 and fewer"),
        ({"longer_than": 100, "depth": 2, "arguments": 3}, "a tree has up to 5"),
        ({"longer_than": 500, "shorter_than": 2000, "depth": 4}, "of 20000 trees none had more than .*longer_than=500"),
    ],
)
def test_impossible_settings_are_refused(options, expected):
    with pytest.raises(InputError, match=expected):
        make_corpus(**options)


def test_rows_too_short():
    corpus = make_corpus()
    with pytest.raises(InputError, match="rows of 199 tokens are too short for the examples, which have 200"):
        LabelledRows(corpus.splits["test"], 199, 0)
