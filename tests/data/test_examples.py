"""Corpora of examples: the inputs and targets of a row, and the copy task."""

import numpy as np
import pytest

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleRows
from flash_lm.data.splits import ROWS, load_splits
from flash_lm.data.synthetic.copying import SYMBOLS
from flash_lm.errors import InputError
from flash_lm.training.setup import build_experiment


class Two:
    """One example of four tokens and one of three."""

    longest = 3

    def __len__(self) -> int:
        return 2

    def example(self, number: int, length: int) -> Example:
        del length
        return [Example(np.array([1, 7, 8, 9], np.int32), 2), Example(np.array([1, 5, 6], np.int32), 1)][number]


def test_targets_are_the_tokens_after_the_prompt():
    rows = ExampleRows(Two(), 5, begin=1)
    assert len(rows) == 2
    first, second = rows[0], rows[1]
    assert first["inputs_BxL"].tolist() == [1, 7, 8, 0, 0]
    assert first["targets_BxL"].tolist() == [7, 8, 9, 0, 0]
    assert first["loss_mask_BxL"].tolist() == [0, 1, 1, 0, 0]
    assert first["segment_ids_BxL"].tolist() == [1, 1, 1, 0, 0]
    assert first["positions_BxL"].tolist() == [0, 1, 2, 0, 0]
    assert second["loss_mask_BxL"].tolist() == [1, 1, 0, 0, 0]


def test_a_row_that_is_too_short_is_refused():
    with pytest.raises(
        InputError,
        match="rows of 2 tokens are too short for the examples, which need 3: set --config.model.max_length",
    ):
        ExampleRows(Two(), 2, begin=1)


def copy_rows(split: str, length: int = 128):
    config = get_config()
    config.data.update(corpus="copy", pack="examples", length=length, tokens_per_batch=length)
    corpus = load_splits(parse(config).data)
    return corpus.tokenizer, ROWS["examples"](corpus.splits[split], length, corpus.tokenizer.begin)


@pytest.mark.parametrize(("length", "word"), [(128, 63), (7, 3), (3, 1)])
def test_only_the_copy_of_the_word_is_a_target(length, word):
    tokenizer, rows = copy_rows("train", length)
    row = rows[5]
    half = word + 1  # <s> and the word
    tokens = np.append(row["inputs_BxL"][: 2 * half - 1], row["targets_BxL"][2 * half - 2])
    assert tokens[:half].tolist() == tokens[half:].tolist()
    assert tokens[0] == tokenizer.begin and set(tokenizer.decode(tokens)) <= set(SYMBOLS)
    asked = np.flatnonzero(row["loss_mask_BxL"])
    assert asked.tolist() == list(range(half, half + word))
    assert row["targets_BxL"][asked].tolist() == row["inputs_BxL"][1:half].tolist()


def test_words_differ_between_rows_and_splits_and_are_deterministic():
    words = [copy_rows(split)[1][i]["inputs_BxL"].tobytes() for split in SPLITS for i in range(20)]
    assert len(set(words)) == len(words)
    assert copy_rows("train")[1][3]["inputs_BxL"].tobytes() == words[3]
    symbols = np.concatenate([copy_rows("train")[1][i]["targets_BxL"][:63] for i in range(200)])
    counts = np.bincount(symbols)[np.unique(symbols)]
    assert len(counts) == len(SYMBOLS) and (abs(counts / counts.sum() - 0.1) < 0.01).all()


def test_rows_too_short_for_a_word():
    with pytest.raises(InputError, match="rows of 2 tokens are too short"):
        copy_rows("train", 2)


@pytest.mark.parametrize(("corpus", "pack"), [("copy", "stream"), ("stdlib", "examples")])
def test_a_corpus_with_the_wrong_packing(corpus, pack):
    config = get_config()
    config.data.update(corpus=corpus, pack=pack)
    with pytest.raises(InputError, match=f"data.corpus={corpus} needs data.pack="):
        parse(config)


def test_examples_are_not_masked():
    config = get_config()
    config.task = "masked_lm"
    config.data.update(corpus="copy", pack="examples")
    with pytest.raises(InputError, match="task=masked_lm needs a corpus of text"):
        parse(config)


@pytest.mark.parametrize(
    ("data", "model", "expected"),
    [
        (
            {"corpus": "copy", "pack": "examples", "length": 2, "tokens_per_batch": 16},
            {},
            "rows of 2 tokens are too short",
        ),
        ({"corpus": "copy", "pack": "examples"}, {"head": "logistics"}, "model.head=logistics is for images"),
    ],
)
def test_impossible_settings_are_reported_before_training(data, model, expected):
    config = get_config()
    config.data.update(**data)
    config.model.update(**model)
    with pytest.raises(InputError, match=expected):
        build_experiment(parse(config))
