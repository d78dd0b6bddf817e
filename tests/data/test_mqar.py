"""Associative recall: rows against the definition, gaps of the queries, and impossible settings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.corpus import SPLITS
from flash_lm.data.splits import ROWS, load_splits
from flash_lm.errors import InputError
from flash_lm.training.setup import build_experiment

WORDS = 64


def make_rows(parts, length=None, split="train", **options):
    config = get_config()
    length = length or max(tokens for tokens, _, _ in parts)
    config.data.update(corpus="mqar", pack="examples", length=length, tokens_per_batch=length)
    config.data.mqar.update(words=WORDS, train=parts, validation=parts, test=parts, **options)
    corpus = load_splits(parse(config).data)
    return corpus, ROWS["examples"](corpus.splits[split], length, corpus.tokenizer.begin)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 12), st.integers(0, 99), st.booleans())
def test_a_row_is_as_defined(pairs, more, number, filler):
    length = 4 * pairs + 2 * more
    _, rows = make_rows(((length, pairs, 100),), length + 3, random_filler=filler)
    row = rows[number]
    inputs, targets, asked = row["inputs_BxL"], row["targets_BxL"], np.flatnonzero(row["loss_mask_BxL"])
    keys, values = inputs[: 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
    assert len(set(keys)) == len(set(values)) == pairs
    assert (keys >= 1).all() and (keys < WORDS // 2).all() and (values >= WORDS // 2).all() and (values < WORDS).all()
    assert len(asked) == pairs and (asked >= 2 * pairs).all() and (asked % 2 == 0).all()
    bound = dict(zip(keys.tolist(), values.tolist(), strict=True))
    assert sorted(inputs[asked]) == sorted(keys)  # each key once
    assert [bound[key] for key in inputs[asked].tolist()] == targets[asked].tolist()
    others = np.delete(inputs[:length], [*range(2 * pairs), *asked])
    assert filler or not others.any()
    assert row["segment_ids_BxL"].tolist() == [1] * length + [0] * 3


def test_the_token_after_a_query_is_not_the_answer():
    """Filler follows: a model that predicts the next input token does not learn this task."""
    _, rows = make_rows(((16, 2, 100),), random_filler=False)
    for number in range(100):
        row = rows[number]
        for index in np.flatnonzero(row["loss_mask_BxL"]):
            assert index + 1 == 16 or row["inputs_BxL"][index + 1] == 0


def test_filler_can_be_a_key():
    _, rows = make_rows(((64, 2, 200),))
    filler = np.concatenate([rows[i]["inputs_BxL"][4:] for i in range(200)])
    assert len(set(filler)) == WORDS  # all words


def test_gaps_follow_the_power_law():
    """The share of rows with a query at each gap, against weighted sampling without replacement."""
    pairs, length, count = 2, 24, 4000
    _, rows = make_rows(((length, pairs, count),), random_filler=False)
    actual = np.zeros(10)
    for number in range(count):
        actual[(np.flatnonzero(rows[number]["loss_mask_BxL"]) - 2 * pairs) // 2] += 1
    likely = 0.01 * np.arange(1, 11) ** (0.01 - 1.0)
    likely /= likely.sum()
    # Two draws: a gap is drawn first, or second after another one.
    second = [sum(likely[i] * likely[gap] / (1 - likely[i]) for i in range(10) if i != gap) for gap in range(10)]
    expected = likely + np.array(second)
    np.testing.assert_allclose(actual / count, expected, atol=4 * 0.5 / np.sqrt(count))


def test_rows_differ_between_numbers_and_splits_and_are_deterministic():
    parts = ((16, 2, 30), (32, 4, 30))
    actual = [make_rows(parts, split=split)[1][i]["inputs_BxL"].tobytes() for split in SPLITS for i in range(60)]
    assert len(set(actual)) == len(actual)
    assert make_rows(parts, split="validation")[1][7]["inputs_BxL"].tobytes() == actual[67]


def test_parts_are_consecutive():
    corpus, rows = make_rows(((16, 2, 3), (32, 4, 5)))
    assert corpus.splits["test"].parts() == {"2 pairs in 16 tokens": range(3), "4 pairs in 32 tokens": range(3, 8)}
    assert [int(rows[i]["loss_mask_BxL"].sum()) for i in range(8)] == [2] * 3 + [4] * 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train": ((16, 5, 1),)}, "data.mqar.train=.* must be a tuple of .tokens, pairs, examples."),
        ({"test": ()}, "data.mqar.test=.* must be a tuple"),
        ({"train": ((17, 2, 1),)}, "even lengths"),
        ({"words": 16, "train": ((64, 8, 1),)}, "data.mqar.words=16 has too few keys for 64 pairs"),
    ],
)
def test_impossible_settings_are_refused(options, expected):
    config = get_config()
    config.data.update(corpus="mqar", pack="examples", length=256, tokens_per_batch=256)
    config.data.mqar.update(**options)
    with pytest.raises(InputError, match=expected):
        parse(config)


def test_training_rows_must_fit_and_test_rows_may_be_longer():
    config = get_config()
    config.model.update(family="aft_simple", num_layers=1, model_dim=8, num_heads=1, max_length=64)
    config.data.update(corpus="mqar", pack="examples", length=16, tokens_per_batch=16)
    short, long = ((16, 2, 4),), ((64, 2, 4),)
    config.data.mqar.update(words=WORDS, train=short, validation=short, test=long)
    experiment = build_experiment(parse(config))
    assert experiment.config.model.vocab_size == WORDS
    with pytest.raises(InputError, match="rows of 16 tokens are too short"):
        experiment.evaluation_rows("test")
    config.data.mqar.validation = long
    with pytest.raises(InputError, match="rows of 16 tokens are too short"):
        build_experiment(parse(config))
