"""Pairs of texts: as examples, and as rows with a source."""

import numpy as np
import pytest
from small import write_pairs

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.examples import ExampleRows
from flash_lm.data.pairs import SourceRows
from flash_lm.data.splits import load_splits
from flash_lm.data.synthetic.copying import copying
from flash_lm.data.synthetic.mqar import MQAROptions, mqar
from flash_lm.errors import InputError

PAIRS = [
    ("eins zwei", "one two"),
    ("drei", "three"),
    ("ein langer Satz ohne Ende", "a long one"),
    (" ", "left out"),
    ("ja", "a much longer answer"),
]
KEPT = [pair for pair in PAIRS if pair[0].strip()]


def config(folder):
    actual = get_config()
    actual.data.update(corpus="hf", path=str(folder), text_column="de", pair_column="en", pack="examples")
    cache = str(folder.parent / "cache")
    actual.data.update(tokenizer="bytes", tokens_per_batch=8 * 64, length=64, cache_dir=cache)
    actual.model.max_length = 64
    return actual


@pytest.fixture
def folder(tmp_path):
    return write_pairs(tmp_path / "pairs", PAIRS)


@pytest.fixture
def corpus(folder):
    return load_splits(parse(config(folder)).data)


def decode(corpus, ids) -> str:
    return corpus.tokenizer.decode(ids)


def test_an_example_is_both_texts_and_their_ends(corpus):
    begin, end = corpus.tokenizer.begin, corpus.tokenizer.end
    split = corpus.splits["train"]
    assert len(split) == len(KEPT)
    for number, (first, second) in enumerate(KEPT):
        one = split.example(number, 64)
        ids = one.ids.tolist()
        assert ids[0] == begin and ids[one.prompt_length - 2 : one.prompt_length] == [end, begin] and ids[-1] == end
        assert decode(corpus, ids[1 : one.prompt_length - 2]) == first
        assert decode(corpus, ids[one.prompt_length : -1]) == second


def test_causal_rows_predict_only_the_second_text(corpus):
    rows = ExampleRows(corpus.splits["train"], 64, corpus.tokenizer.begin)
    for number, (_, second) in enumerate(KEPT):
        row = rows[number]
        predicted = row["targets_BxL"][row["loss_mask_BxL"] > 0]
        assert decode(corpus, predicted[:-1]) == second and predicted[-1] == corpus.tokenizer.end


def test_rows_with_a_source_hold_the_texts_separately(corpus):
    rows = SourceRows(corpus.splits["train"], 64, corpus.tokenizer.begin)
    for number, (first, second) in enumerate(KEPT):
        row = rows[number]
        source = row["source_BxM"][row["source_segment_ids_BxM"] > 0]
        assert source[0] == corpus.tokenizer.begin and source[-1] == corpus.tokenizer.end
        assert decode(corpus, source[1:-1]) == first
        real = row["segment_ids_BxL"] > 0
        assert row["inputs_BxL"][0] == corpus.tokenizer.begin
        assert decode(corpus, row["inputs_BxL"][real][1:]) == second
        assert decode(corpus, row["targets_BxL"][real][:-1]) == second
        np.testing.assert_array_equal(row["loss_mask_BxL"], real)


def test_texts_that_do_not_fit_are_truncated_at_the_end(corpus):
    """In one row the longer text is truncated first; with a source each text has a separate row."""
    split = corpus.splits["train"]
    for number, (first, second) in enumerate(KEPT):
        one = split.example(number, 15)
        assert len(one.ids) <= 16 and 0 < one.prompt_length <= len(one.ids)
        row = SourceRows(split, 8, corpus.tokenizer.begin)[number]
        source = row["source_BxM"][row["source_segment_ids_BxM"] > 0]
        assert len(source) == min(8, len(first.encode()) + 2)
        assert int(row["loss_mask_BxL"].sum()) == min(8, len(second.encode()) + 1)


def test_a_copy_is_written_from_its_source():
    corpus = copying()
    row = SourceRows(corpus.splits["test"], 9, corpus.tokenizer.begin)[3]
    np.testing.assert_array_equal(row["source_BxM"][1:9], row["targets_BxL"][:8])
    assert row["source_segment_ids_BxM"].all() and row["loss_mask_BxL"].sum() == 8
    back = SourceRows(copying(reverse=True).splits["test"], 9, corpus.tokenizer.begin)[3]
    np.testing.assert_array_equal(back["source_BxM"][1:9][::-1], back["targets_BxL"][:8])
    assert copying().fingerprint != copying(reverse=True).fingerprint


def test_examples_without_a_first_part_have_no_source():
    corpus = mqar(MQAROptions(words=64, train=((32, 4, 8),), validation=((32, 4, 8),), test=((32, 4, 8),)))
    with pytest.raises(InputError, match="needs examples whose second part begins with begin-of-text"):
        SourceRows(corpus.splits["train"], 32, corpus.tokenizer.begin)


def test_an_answer_that_continues_its_text_is_no_second_part():
    """The answer to a needle continues the text; truncating a source would remove its question."""
    config = get_config()
    config.data.update(corpus="needle", path=__file__, pack="examples", length=512)
    corpus = load_splits(parse(config).data)
    with pytest.raises(InputError, match="needs examples whose second part begins with begin-of-text"):
        SourceRows(corpus.splits["train"], 512, corpus.tokenizer.begin)


def test_only_a_data_set_has_pairs(tmp_path):
    """Documents of other corpora are no pairs, whatever the key."""
    config = get_config()
    config.data.update(corpus="text", path=str(tmp_path), pair_column="b", pack="examples")
    with pytest.raises(InputError, match="data.corpus=text needs data.pack=stream or documents, not examples"):
        parse(config)


def test_a_source_that_is_too_long():
    class Long:
        longest = 40

        def __len__(self) -> int:
            return 1

        def example(self, number, length):
            return copying().splits["test"].example(number, 39)

    with pytest.raises(InputError, match="sources and rows of 16 tokens are too short for the examples, which need 40"):
        SourceRows(Long(), 16, copying().tokenizer.begin)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"data.pack": "stream"}, "data.pair_column=en needs data.pack=examples, not stream"),
        ({"data.streaming": True}, "data.pair_column needs data.streaming=False"),
        ({"data.label_share": 0.5}, "data.label_share is of texts with labels"),
        ({"data.pair_column": "de"}, "data.pair_column and data.text_column are both de"),
        ({"task": "seq2seq"}, "task=seq2seq needs an encoder: set --config.model.encoder.family"),
        ({"model.encoder.family": "flash"}, "model.encoder.family=flash needs a source: set --config.task=seq2seq"),
        ({"task": "prefix_lm", "model.family": "flash"}, "model.family=flash cannot see a prefix both ways"),
        (
            {"task": "seq2seq", "model.encoder.family": "flash", "data.corpus": "stdlib", "data.pair_column": None}
            | {"data.path": None, "data.pack": "stream"},
            "task=seq2seq needs pairs: set data.pack=examples",
        ),
    ],
)
def test_keys_that_exclude_each_other(folder, keys, match):
    actual = config(folder)
    actual.update_from_flattened_dict(keys)
    with pytest.raises(InputError, match=match):
        parse(actual)
