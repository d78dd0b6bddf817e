"""Corpora: their files, splits, and the errors of bad files."""

import gzip
import pathlib
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import documents

from flash_lm.config.data import DataConfig
from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data import text_files
from flash_lm.data.corpus import SPLITS, UNSPLIT
from flash_lm.data.token_cache import load_corpus
from flash_lm.errors import InputError


def text_config(path) -> DataConfig:
    config = get_config()
    config.data.update(corpus="text", path=str(path))
    return parse(config).data


def test_splits_are_disjoint_by_document_and_complete(tmp_path):
    texts = {f"document {i}\n" * (i + 1) for i in range(40)}
    for i, text in enumerate(sorted(texts)):
        (tmp_path / f"{i}.txt").write_text(text)
    corpus = load_corpus(text_config(tmp_path / "*.txt"))
    parts = [set(documents(corpus, split)) for split in SPLITS]
    assert parts[0] | parts[1] | parts[2] == texts
    assert sum(map(len, parts)) == len(texts)
    assert [len(part) for part in parts] == [36, 2, 2]


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("Training.txt", "dev.txt", "eval.txt"),
        ("wiki.train.tokens.txt", "wiki.val.tokens.txt", "wiki.test.tokens.txt"),
        ("train/a.txt", "validation/a.txt", "test/a.txt"),
        ("train/test-driven.txt", "validation/trains.txt", "test/a.txt"),
        ("test_data/train-0.txt", "test_data/dev-0.txt", "test_data/test-0.txt"),
    ],
    ids=lambda names: names[0],
)
@pytest.mark.parametrize("as_glob", [False, True], ids=["folder", "glob"])
def test_file_names_give_the_split(tmp_path, names, as_glob):
    for split, name in zip(SPLITS, names, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"text of {split}\n" * (9 if split == "test" else 1))
    corpus = load_corpus(text_config(tmp_path / "**" / "*.txt" if as_glob else tmp_path))
    for split in SPLITS:
        assert set("".join(documents(corpus, split)).splitlines()) == {f"text of {split}"}


def test_equal_texts_with_other_names_are_another_corpus(tmp_path):
    """Otherwise the cached tokens of one would be used for the other."""
    prints = set()
    for folder, names in {"a": ("train", "dev", "test"), "b": ("dev", "test", "train"), "c": "xyz"}.items():
        (tmp_path / folder).mkdir()
        for name, text in zip(names, ("one\n", "two\n", "three\n"), strict=True):
            (tmp_path / folder / f"{name}.txt").write_text(text)
        prints.add(load_corpus(text_config(tmp_path / folder)).fingerprint)
    assert len(prints) == 3


def test_a_missing_split_is_held_out_of_the_training_files(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document {i}\n" * 9)
    (tmp_path / "test.txt").write_text("the test\n")
    corpus = load_corpus(text_config(tmp_path))
    assert documents(corpus, "test") == ["the test\n"]
    assert [len(documents(corpus, split)) for split in SPLITS] == [38, 2, 1]


def test_files_without_a_split_are_left_out_next_to_training_files(tmp_path, caplog):
    for name in ("train", "test", "valid", "notes"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    corpus = load_corpus(text_config(tmp_path))
    assert documents(corpus, UNSPLIT) == ["test\n", "train\n", "valid\n"]
    assert caplog.text.count("files whose names say no split are left out: 1, such as") == 1
    assert "notes.txt" in caplog.text
    for i in range(3):
        (tmp_path / f"notes {i}.txt").write_text("x")
    with pytest.raises(InputError, match=r"4 files, such as .*notes.*, would be left out, since .*train.txt say"):
        load_corpus(text_config(tmp_path))


def test_words_of_a_title_do_not_name_a_split(tmp_path):
    for title in ("The Night Train", "Training Day", "Val d'Or", "a b c"):
        (tmp_path / f"{title}.txt").write_text(f"{title}\n")
    corpus = load_corpus(text_config(tmp_path))
    assert len(documents(corpus, UNSPLIT)) == 4 and corpus.size("train") >= corpus.size("test")


def test_nothing_but_test_files(tmp_path):
    """A folder of test files has no training text; if the file itself, or a glob, is named, it is used."""
    (tmp_path / "test.txt").write_text("line\n" * 99)
    corpus = load_corpus(text_config(tmp_path))
    assert "".join(documents(corpus, UNSPLIT)) == "line\n" * 99
    with pytest.raises(InputError, match="say validation or test: give files for training, too"):
        documents(corpus, "train")
    for path in (tmp_path / "test.txt", tmp_path / "te*.txt"):
        corpus = load_corpus(text_config(path))
        assert all("".join(documents(corpus, split)) for split in SPLITS)
    (tmp_path / "valid.txt").write_text("line\n" * 99)
    with pytest.raises(InputError, match="say validation or test"):
        documents(load_corpus(text_config(tmp_path / "*.txt")), "train")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.booleans())
def test_training_has_at_least_as_much_text_as_is_held_out(sizes, has_test):
    with tempfile.TemporaryDirectory() as folder:
        for i, size in enumerate(sizes):
            (pathlib.Path(folder) / f"{i}.txt").write_text(f"line {i:02}\n" * size)
        if has_test:
            (pathlib.Path(folder) / "test.txt").write_text("line\n")
        corpus = load_corpus(text_config(folder))
        held_out = corpus.size("validation") + (0 if has_test else corpus.size("test"))
        assert corpus.size("train") >= held_out
        assert sum(corpus.size(split) for split in SPLITS) == corpus.size(UNSPLIT)


def test_a_file_is_read_once_despite_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a\n")
    (tmp_path / "soft.txt").symlink_to(tmp_path / "real" / "a.txt")
    (tmp_path / "hard.txt").hardlink_to(tmp_path / "real" / "a.txt")
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    for name in ("up", "again"):  # two cycles: without a guard, 2⁴⁰ paths
        (tmp_path / "real" / name).symlink_to(tmp_path)
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "back").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "**" / "*.txt", tmp_path / "**"):
        assert documents(load_corpus(text_config(path)), UNSPLIT) == ["a\n"]


def test_folders_that_link_to_each_other(tmp_path):
    for name, other in ("ab", "ba"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(f"{name}\n")
        (tmp_path / name / "other").symlink_to(tmp_path / other)
    assert sorted(documents(load_corpus(text_config(tmp_path)), UNSPLIT)) == ["a\n", "b\n"]


def test_a_link_may_name_one_split_but_not_two(tmp_path):
    (tmp_path / "all").mkdir()
    for name in "abc":
        (tmp_path / "all" / f"{name}.txt").write_text(f"{name}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "x.txt").symlink_to(tmp_path / "all" / "b.txt")
    corpus = load_corpus(text_config(tmp_path))
    assert documents(corpus, "test") == ["b\n"]
    assert "b\n" not in documents(corpus, "train") + documents(corpus, "validation")
    (tmp_path / "train.txt").symlink_to(tmp_path / "all" / "b.txt")
    with pytest.raises(InputError, match=r"are the same file, named as \w+ and as \w+: remove one of them"):
        load_corpus(text_config(tmp_path))


def test_a_byte_order_mark_is_text_only_inside_a_file(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_bytes(f"\ufefftext {i} \ufeff\n".encode())
    corpus = load_corpus(text_config(tmp_path))
    assert sorted("".join(documents(corpus, UNSPLIT)).splitlines()) == [f"text {i} \ufeff" for i in range(4)]
    assert corpus.size(UNSPLIT) == 4 * len("text 0 \ufeff\n".encode())


@pytest.mark.parametrize("name", ["notes [draft].txt", "[v2] data/a.txt", "what?/*.txt"])
def test_an_existing_path_is_not_a_glob(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("line\n" * 99)
    for index in (path, path.parent, path.parent / "*.txt"):
        assert "".join(documents(load_corpus(text_config(index)), UNSPLIT)) == "line\n" * 99


def test_compressed_text_is_the_same_corpus(tmp_path):
    for folder in ("plain", "packed"):
        (tmp_path / folder).mkdir()
    for i in range(2):
        text = "".join(f"line {i} {j} ünd\n" for j in range(300)).encode()
        (tmp_path / "plain" / f"{i}.txt").write_bytes(text)
        (tmp_path / "packed" / f"{i}.txt.gz").write_bytes(gzip.compress(text))
    plain, packed = (load_corpus(text_config(tmp_path / folder)) for folder in ("plain", "packed"))
    assert plain.fingerprint == packed.fingerprint
    for split in (*SPLITS, UNSPLIT):
        assert documents(plain, split) == documents(packed, split) and plain.size(split) == packed.size(split)
    data = (tmp_path / "packed" / "0.txt.gz").read_bytes()
    (tmp_path / "packed" / "0.txt.gz").rename(tmp_path / "packed" / "0.txt")  # the fingerprint is of the content
    assert load_corpus(text_config(tmp_path / "packed")).fingerprint == plain.fingerprint
    (tmp_path / "packed" / "0.txt").write_bytes(data[:50])
    with pytest.raises(InputError, match="cannot read .*0.txt: it is truncated or damaged"):
        load_corpus(text_config(tmp_path / "packed"))


def test_equal_files_fall_into_the_same_split(tmp_path):
    for i in range(20):
        for copy in range(3):
            (tmp_path / f"{copy}-{i}.txt").write_text(f"number {i}\n")
    corpus = load_corpus(text_config(tmp_path / "*.txt"))
    parts = [documents(corpus, split) for split in SPLITS]
    assert sum(map(len, parts)) == 60
    assert not set(parts[0]) & set(parts[1]) and not set(parts[0] + parts[1]) & set(parts[2])


@pytest.mark.parametrize("text", ["".join(f"line {i} ünd\n" for i in range(999)), "猫" * 5000, "x" * 100])
def test_a_single_file_is_split_into_contiguous_blocks(tmp_path, text, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", 64)  # lines and characters then cross block boundaries
    path = tmp_path / "one.txt"
    path.write_text(text, encoding="utf-8")
    corpus = load_corpus(text_config(path))
    parts = ["".join(documents(corpus, split)) for split in SPLITS]
    assert "".join(parts) == text
    assert 0.85 < len(parts[0]) / len(text) < 0.95
    assert all(parts)
    if "\n" in text:
        assert all(part.endswith("\n") for part in parts)


def test_pieces_are_small_and_end_at_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", 64)
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("".join(f"line {i}-{j}\n" for j in range(100)))
    pieces = list(load_corpus(text_config(tmp_path / "*.txt")).pieces("train"))
    assert len(pieces) > 10
    assert all(len(piece.text) <= 128 and piece.text.endswith("\n") for piece in pieces)
    assert sum(piece.begins_document for piece in pieces) == 3  # one block per file


def test_the_fingerprint_is_of_the_content(tmp_path):
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path in paths:
        path.write_text(path.name)
    before = load_corpus(text_config(tmp_path / "*.txt")).fingerprint
    assert load_corpus(text_config(tmp_path / "*.txt")).fingerprint == before
    paths[1].write_text("other")
    assert load_corpus(text_config(tmp_path / "*.txt")).fingerprint != before


def test_a_folder_stands_for_its_text_files(tmp_path):
    """Also those in subfolders, with special characters in their names."""
    folder = tmp_path / "books [1]"
    (folder / "more").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "more/c.txt", "notes.md"):
        (folder / name).write_text(name)
    corpus = load_corpus(text_config(folder))
    assert sorted(documents(corpus, UNSPLIT)) == ["a.txt", "b.txt", "more/c.txt"]
    with pytest.raises(InputError, match="no file matches .*: give a text file, a folder with .txt files"):
        load_corpus(text_config(tmp_path / "books"))


def test_the_standard_library_is_a_corpus():
    corpus = load_corpus(parse(get_config()).data)
    sizes = [corpus.size(split) for split in SPLITS]
    assert sizes[0] > 5_000_000 and min(sizes) > 100_000
    assert "import" in next(corpus.pieces("test")).text or corpus.size("test")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "no file matches"),
        ({"a.txt": b""}, "is empty"),
        ({"a.txt": b"good\n", "b.txt": b"bad \xff\xfe", "c.txt": b"good too"}, "b.txt is not UTF-8 at byte 4"),
        ({"a.txt": b"cut \xe7\x8c", "b.txt": b"x", "c.txt": b"y"}, "a.txt is not UTF-8 at byte 4"),
    ],
)
def test_bad_files_end_in_one_line(tmp_path, content, expected):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=expected) as error:
        corpus = load_corpus(text_config(tmp_path / "*.txt"))
        for split in SPLITS:
            list(corpus.pieces(split))
    assert "\n" not in str(error.value)


def test_the_position_of_a_broken_byte_is_counted_over_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", 64)
    path = tmp_path / "one.txt"
    path.write_bytes("ü\n".encode() * 200 + b"\xff" + b"z\n" * 2000)
    with pytest.raises(InputError, match="at byte 600:"):
        list(load_corpus(text_config(path)).pieces("train"))
