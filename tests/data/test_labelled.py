"""Texts with labels: rows, label names, and errors of bad columns."""

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from small import write_corpus

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.labelled import LabelledRows, cut_share, sizes_in_row
from flash_lm.data.splits import load_splits
from flash_lm.errors import InputError

SPLITS = {
    "train": (["good film", " ", "bad", "a good one, at length", "so bad"], ["yes", "no", "no", "yes", "no"]),
    "validation": (["bad film"], ["no"]),
    "test": (["good", "worse"], ["yes", "no"]),
}


def write(folder, splits=SPLITS, name="label"):
    folder.mkdir(exist_ok=True)
    for split, (texts, labels) in splits.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, name: labels}), folder / f"{split}.parquet")
    return folder


def load(folder, cache, **data):
    config = get_config()
    config.task = "classify"
    config.data.update(corpus="hf", path=str(folder), tokenizer="bytes", cache_dir=str(cache), length=16)
    config.data.update(**{"label_column": "label", "tokens_per_batch": 16, **data})
    return load_splits(parse(config).data)


def test_a_row_is_the_start_of_a_text_and_its_label(tmp_path):
    corpus = load(write(tmp_path / "data"), tmp_path / "cache")
    assert corpus.labels == ("no", "yes")
    rows = LabelledRows(corpus.splits["train"], 16, corpus.tokenizer.begin)
    texts = [corpus.tokenizer.decode(rows[i]["inputs_BxL"]) for i in range(len(rows))]
    assert texts == ["good film", "bad", "a good one, at "[:15], "so bad"]  # white space alone is no document
    assert [corpus.labels[rows[i]["targets_BxL"][0]] for i in range(len(rows))] == ["yes", "no", "yes", "no"]
    assert [rows[i]["loss_mask_BxL"].tolist() for i in range(2)] == [[1] + [0] * 15] * 2
    assert (rows[1]["segment_ids_BxL"] > 0).sum() == 5  # with begin- and end-of-text


@pytest.mark.parametrize("kind", ["csv", "jsonl", "hub"])
def test_labels_of_other_files_and_of_the_hub(kind, tmp_path, monkeypatch):
    """Rows and labels equal those from parquet."""
    expected = load(write(tmp_path / "parquet"), tmp_path / "cache")
    folder = tmp_path / kind
    folder.mkdir()
    for split, (texts, labels) in SPLITS.items():
        rows = datasets.Dataset.from_dict({"text": texts, "label": labels})
        to_file = rows.to_csv if kind == "csv" else rows.to_json
        to_file(folder / f"{split}.{'csv' if kind == 'csv' else 'jsonl'}")
    data = {}
    if kind == "hub":
        files = {split: str(folder / f"{split}.jsonl") for split in SPLITS}
        real = datasets.load_dataset_builder
        asked = []

        def load_from_hub(name, *words, **options):
            asked.append(name)
            return real("json", data_files=files, cache_dir=str(tmp_path / "hub"))

        monkeypatch.setattr(datasets, "load_dataset_builder", load_from_hub)
        data = {"path": None, "name": "somebody/reviews"}
    actual = load(folder, tmp_path / "cache", **data)
    assert actual.labels == expected.labels and (kind != "hub" or "somebody/reviews" in asked)
    for split in SPLITS:
        assert actual.splits[split].labels.tolist() == expected.splits[split].labels.tolist()
        assert actual.splits[split].tokens.tolist() == expected.splits[split].tokens.tolist()


def test_numbers_and_truth_values_are_labels_in_order(tmp_path):
    numbers = {split: (texts, [10 if x == "yes" else 2 for x in labels]) for split, (texts, labels) in SPLITS.items()}
    assert load(write(tmp_path / "a", numbers), tmp_path / "cache").labels == ("2", "10")
    truths = {split: (texts, [x == "yes" for x in labels]) for split, (texts, labels) in SPLITS.items()}
    corpus = load(write(tmp_path / "b", truths), tmp_path / "cache")
    assert corpus.labels == ("False", "True") and corpus.splits["test"].labels.tolist() == [1, 0]


def test_plus_and_minus_one_are_labels(tmp_path):
    """−1 means a missing label only where labels are class names."""
    signs = {split: (texts, [1 if x == "yes" else -1 for x in labels]) for split, (texts, labels) in SPLITS.items()}
    assert load(write(tmp_path / "data", signs), tmp_path / "cache").labels == ("-1", "1")
    named = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    for split, (texts, labels) in SPLITS.items():
        values = [-1 if split == "test" else int(x == "yes") for x in labels]
        rows = datasets.Dataset.from_dict({"text": texts, "label": values}, named)
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    with pytest.raises(InputError, match="2 documents of the test split have no label"):
        load(tmp_path / "data", tmp_path / "cache")


def test_a_label_that_no_training_text_has(tmp_path):
    named = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes", "?"])}
    )
    (tmp_path / "data").mkdir()
    for split, (texts, labels) in SPLITS.items():
        rows = datasets.Dataset.from_dict({"text": texts, "label": [int(x == "yes") for x in labels]}, named)
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    with pytest.raises(InputError, match=r"no text of the training split has the label \?, which column label names"):
        load(tmp_path / "data", tmp_path / "cache")


def test_a_table_with_an_empty_label(tmp_path):
    """Its integers are read as floats."""
    (tmp_path / "data").mkdir()
    for split in SPLITS:
        (tmp_path / "data" / f"{split}.csv").write_text("text,label\na text,1\nanother,\na third,0\n")
    with pytest.raises(InputError, match=r"no column label of labels .* without empty cells"):
        load(tmp_path / "data", tmp_path / "cache")


@pytest.mark.parametrize("path", ["data", "data/train.csv"])
def test_words_that_mean_a_missing_value_in_tables_only(path, tmp_path):
    """None and NA are labels and texts; only an empty cell is a missing value."""
    (tmp_path / "data").mkdir()
    for split in SPLITS if path == "data" else ["train"]:
        (tmp_path / "data" / f"{split}.csv").write_text("text,label\n" + "a text,NA\nnull,None\n,None\n" * 30)
    corpus = load(tmp_path / path, tmp_path / "cache")
    assert corpus.labels == ("NA", "None")
    rows = LabelledRows(corpus.splits["train"], 8, corpus.tokenizer.begin)
    assert {corpus.tokenizer.decode(rows[i]["inputs_BxL"]) for i in range(len(rows))} == {"a text", "null"}


def test_one_label_only(tmp_path):
    same = {split: (texts, ["yes"] * len(texts)) for split, (texts, _) in SPLITS.items()}
    with pytest.raises(InputError, match="all texts of the training split have the same label in column label, yes"):
        load(write(tmp_path / "data", same), tmp_path / "cache")


PAIRS = {
    "train": (["a cat", "one", "x" * 9, " ", "y" * 4], ["a dog", "two", "y", "alone", "z" * 40], list("noyno")),
    "validation": (["one"], ["two"], ["n"]),
    "test": (["one"], ["two"], ["o"]),
}


def write_pairs(folder):
    folder.mkdir()
    for split, (first, second, labels) in PAIRS.items():
        table = pyarrow.table({"text": first, "other": second, "label": labels})
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
    return folder


def test_a_row_is_both_texts_of_a_pair(tmp_path):
    corpus = load(write_pairs(tmp_path / "data"), tmp_path / "cache", pair_column="other")
    begin, end, split = corpus.tokenizer.begin, corpus.tokenizer.end, corpus.splits["train"]
    rows = LabelledRows(split, 16, begin)
    ids = lambda *texts: [x for text in texts for x in (begin, *corpus.tokenizer.encode([text])[0], end)]
    assert len(rows) == 4  # half a pair is left out
    inputs = [rows[i]["inputs_BxL"][rows[i]["segment_ids_BxL"] > 0].tolist() for i in range(4)]
    assert inputs[0] == ids("a cat", "a dog") and inputs[1] == ids("one", "two") and inputs[2] == ids("x" * 9, "y")
    assert inputs[3] == ids("y" * 4) + ids("z" * 40)[:10]  # the longer one is truncated first
    assert [corpus.labels[rows[i]["targets_BxL"][0]] for i in range(4)] == list("noyo")
    assert cut_share(split, 16) == 0.25 and cut_share(split, 8) == 1.0


def test_the_longer_text_of_a_pair_is_truncated_first():
    for first in range(1, 12):
        for second in range(1, 12):
            a, b = first, second
            while a + b > 9:  # token by token
                a, b = (a, b - 1) if b >= a else (a - 1, b)
            actual = sizes_in_row([first, second], 9)
            assert sum(actual) == a + b and actual == [a, b], (first, second)
    assert sizes_in_row([5], 9) == [5] and sizes_in_row([15], 9) == [9]


def test_a_smaller_share_of_the_labels_is_part_of_a_larger(tmp_path):
    texts = [f"text {i}" for i in range(100)]
    data = {"train": (texts, ["ab"[i % 2] for i in range(100)]), "test": SPLITS["test"], "validation": SPLITS["test"]}
    data = {split: (x, ["ab"[i % 2] for i in range(len(x))]) for split, (x, _) in data.items()}
    folder, actual = write(tmp_path / "data", data), {}
    for share in (0.1, 0.5, 1.0):
        corpus = load(folder, tmp_path / "cache", label_share=share)
        rows = LabelledRows(corpus.splits["train"], 16, corpus.tokenizer.begin)
        actual[share] = [
            (corpus.tokenizer.decode(rows[i]["inputs_BxL"]), int(rows[i]["targets_BxL"][0])) for i in range(len(rows))
        ]
        assert len(LabelledRows(corpus.splits["test"], 16, corpus.tokenizer.begin)) == 2  # test splits are complete
    assert [len(x) for x in actual.values()] == [10, 50, 100]
    assert set(actual[0.1]) < set(actual[0.5]) < set(actual[1.0])
    assert all(int(text.split()[1]) % 2 == label for text, label in actual[0.5])


def test_a_share_must_leave_a_text_for_each_label(tmp_path):
    data = SPLITS | {"train": ([f"text {i}" for i in range(50)], ["no"] * 49 + ["yes"])}
    folder = write(tmp_path / "data", data)
    with pytest.raises(InputError, match=r"label_share=0.02 leaves no text .* with the label (yes|no): raise it"):
        load(folder, tmp_path / "cache", label_share=0.02)


def test_a_label_that_only_held_out_texts_have(tmp_path):
    """Some texts of a single file are held out, always including the first one."""
    texts = [f"text {i}" for i in range(60)]
    folder = write(tmp_path / "data", {"train": (texts, ["rare", *["a", "b"] * 30][:60])})
    with pytest.raises(InputError, match="has the label rare, which the training split lacks; it has a, b"):
        load(folder, tmp_path / "cache")


def test_another_text_needs_no_labels(tmp_path):
    """A language model may be scored on it, though its run names a column of labels."""
    config = _plain(tmp_path, tmp_path / "cache")
    config.data.update(corpus="text", path=write_corpus(tmp_path / "text"), label_column="label")
    assert load_splits(parse(config).data).labels == ()


def test_held_out_splits_keep_their_labels(tmp_path):
    texts = [f"text {i} {'even' if i % 2 == 0 else 'odd'}" for i in range(80)]
    labels = [text.split()[-1] for text in texts]
    corpus = load(
        write(tmp_path / "data", {"train": (texts, labels)}), tmp_path / "cache", length=32, tokens_per_batch=32
    )
    for split in ("train", "validation", "test"):
        rows = LabelledRows(corpus.splits[split], 32, corpus.tokenizer.begin)
        assert len(rows) > 0
        for i in range(len(rows)):
            assert corpus.tokenizer.decode(rows[i]["inputs_BxL"]).endswith(corpus.labels[rows[i]["targets_BxL"][0]])


@pytest.mark.parametrize(
    ("splits", "data", "expected"),
    [
        (SPLITS, {"label_column": "mark"}, "no column mark of labels .* is one of text, label"),
        (
            SPLITS | {"test": (["x"], ["maybe"])},
            {},
            "the test split of corpus data has the label maybe, which the train",
        ),
        (
            SPLITS | {"test": (["x", "y"], ["yes", None])},
            {},
            "1 documents of the test split have no label in column",
        ),
        ({"train": (["a b"] * 9, [0.5] * 9)}, {}, "no column label of labels"),
        (SPLITS, {"pair_column": "other"}, "no column other of text .*: --config.data.pair_column is one of text"),
    ],
)
def test_bad_labels_are_reported(tmp_path, splits, data, expected):
    with pytest.raises(InputError, match=expected):
        load(write(tmp_path / "data", splits), tmp_path / "cache", **data)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"data.corpus": "stdlib"}, "task=classify needs labels, and data.corpus=stdlib has none"),
        ({"data.corpus": "hf", "data.path": "x"}, "task=classify needs labels, and data.corpus=hf has none"),
        (
            {"data.corpus": "hf", "data.path": "x", "data.label_column": "label", "data.streaming": True},
            "data.label_column needs data.streaming=False",
        ),
        ({"data.corpus": "copy", "data.pack": "examples"}, "task=classify needs labels, and data.corpus=copy has none"),
        (
            {"data.corpus": "hf", "data.path": "x", "data.label_column": "label", "data.pair_column": "text"},
            "data.pair_column and data.text_column are both text",
        ),
        (
            {"data.corpus": "hf", "data.path": "x", "data.pair_column": "other"},
            "data.pair_column=other needs data.pack=examples, not stream",
        ),
    ],
)
def test_settings_without_classification_are_refused(keys, expected):
    config = get_config()
    config.task = "classify"
    config.update_from_flattened_dict(keys)
    with pytest.raises(InputError, match=expected):
        parse(config)


def test_labels_do_not_change_the_text(tmp_path):
    """A model can first be trained on the same text, with the same tokens."""
    folder, cache = write(tmp_path / "data"), tmp_path / "cache"
    labelled, plain = load(folder, cache), load_splits(parse(_plain(folder, cache)).data)
    assert labelled.fingerprint == plain.fingerprint and plain.labels == ()
    assert labelled.splits["train"].tokens.tolist() == plain.splits["train"].tokens.tolist()


def _plain(folder, cache):
    config = get_config()
    config.data.update(corpus="hf", path=str(folder), tokenizer="bytes", cache_dir=str(cache), length=16)
    return config
