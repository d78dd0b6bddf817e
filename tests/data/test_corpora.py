"""Corpora: what is read, how it is split, and the errors of bad files."""

import pytest
from small import documents

from flash_lm.config import DataConfig, parse
from flash_lm.configs.base import get_config
from flash_lm.data import text_files
from flash_lm.data.corpus import SPLITS
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


def test_equal_files_fall_into_the_same_split(tmp_path):
    for i in range(20):
        for copy in range(3):
            (tmp_path / f"{copy}-{i}.txt").write_text(f"number {i}\n")
    corpus = load_corpus(text_config(tmp_path / "*.txt"))
    parts = [documents(corpus, split) for split in SPLITS]
    assert sum(map(len, parts)) == 60
    assert not set(parts[0]) & set(parts[1]) and not set(parts[0] + parts[1]) & set(parts[2])


@pytest.mark.parametrize("text", ["".join(f"line {i} ünd\n" for i in range(999)), "猫" * 5000, "x" * 100])
def test_a_single_file_is_cut_into_contiguous_blocks(tmp_path, text, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", 64)  # so that lines and characters cross what is read at a time
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
    assert sum(piece.begins_document for piece in pieces) == 1


def test_the_fingerprint_is_of_the_content(tmp_path):
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path in paths:
        path.write_text(path.name)
    before = load_corpus(text_config(tmp_path / "*.txt")).fingerprint
    assert load_corpus(text_config(tmp_path / "*.txt")).fingerprint == before
    paths[1].write_text("other")
    assert load_corpus(text_config(tmp_path / "*.txt")).fingerprint != before


def test_a_folder_is_its_text_files(tmp_path):
    """Also those of folders in it, whatever is special in its name."""
    folder = tmp_path / "books [1]"
    (folder / "more").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "more/c.txt", "notes.md"):
        (folder / name).write_text(name)
    corpus = load_corpus(text_config(folder))
    assert sorted(documents(corpus, "whole")) == ["a.txt", "b.txt", "more/c.txt"]
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


def test_the_place_of_a_broken_byte_is_counted_over_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", 64)
    path = tmp_path / "one.txt"
    path.write_bytes("ü\n".encode() * 200 + b"\xff" + b"z\n" * 2000)
    with pytest.raises(InputError, match="at byte 600:"):
        list(load_corpus(text_config(path)).pieces("train"))
