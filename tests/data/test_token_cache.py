"""The cache: tokenised once, keyed by content, written whole or not at all."""

import itertools
import os

import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config import parse
from flash_lm.data import corpora, text_files, token_cache
from flash_lm.data.token_cache import load_tokenized
from flash_lm.errors import InputError


@pytest.fixture
def config(tmp_path):
    return parse(small_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")).data


def test_the_tokens_are_the_documents(config, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", 64)  # documents of several pieces
    monkeypatch.setattr(token_cache, "_BATCH_BYTES", 200)
    tokenized = load_tokenized(config)
    corpus, tokenizer = corpora.load_corpus(config), tokenized.tokenizer
    for split, store in tokenized.splits.items():
        pieces = list(corpus.pieces(split))
        texts = [tokenizer.decode(store.tokens[a:b].tolist()) for a, b in itertools.pairwise(store.starts)]
        assert "".join(texts) == "".join(piece.text for piece in pieces)
        assert len(texts) == sum(piece.begins_document for piece in pieces)
        assert all(store.tokens[store.starts[:-1]] == tokenizer.begin)
        assert all(store.tokens[store.starts[1:] - 1] == tokenizer.end)
        assert store.starts[-1] == len(store.tokens)
        assert store.bytes == sum(len(text.encode()) for text in texts)
        assert store.words == sum(len(text.split()) for text in texts)


def test_it_is_tokenised_once(config, monkeypatch):
    first = load_tokenized(config)
    monkeypatch.setattr(token_cache, "_tokenize", None)  # would fail if called
    second = load_tokenized(config)
    assert isinstance(second.splits["train"].tokens, np.memmap)
    assert (first.splits["train"].tokens == second.splits["train"].tokens).all()


def test_changed_content_is_tokenised_anew(config, tmp_path):
    first = load_tokenized(config)
    write_corpus(tmp_path / "corpus", seed=1)
    second = load_tokenized(config)
    assert first.fingerprint != second.fingerprint
    assert not np.array_equal(first.splits["train"].tokens, second.splits["train"].tokens)


def test_a_failure_leaves_nothing(config, monkeypatch):
    real, calls = token_cache._tokenize, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("disk full")
        return real(*arguments)

    monkeypatch.setattr(token_cache, "_tokenize", fail)
    with pytest.raises(OSError, match="disk full"):
        load_tokenized(config)
    assert os.listdir(config.cache_dir) == []
    monkeypatch.setattr(token_cache, "_tokenize", real)
    assert load_tokenized(config).splits


def test_a_corpus_without_enough_text_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("x")
    config = small_config(str(tmp_path / "one.txt"), tmp_path / "cache")
    with pytest.raises(InputError, match="too small: its .* split has no text"):
        load_tokenized(parse(config).data)


def test_a_given_tokenizer_is_used_and_a_missing_one_reported(config, tmp_path):
    settings = small_config(config.path, tmp_path / "cache")
    settings.data.update(tokenizer="sentencepiece", vocab_size=300)
    trained = load_tokenized(parse(settings).data).tokenizer
    (tmp_path / "given.model").write_bytes(trained.model_bytes())
    settings.data.tokenizer_path = str(tmp_path / "given.model")
    assert load_tokenized(parse(settings).data).tokenizer.fingerprint == trained.fingerprint
    settings.data.tokenizer_path = str(tmp_path / "missing.model")
    with pytest.raises(InputError, match=r"cannot read data.tokenizer_path=.*missing.model"):
        load_tokenized(parse(settings).data)


def test_a_tokenizer_is_trained_on_text_without_line_ends(tmp_path):
    (tmp_path / "one.txt").write_text("all of this is one long line " * 20_000)
    config = small_config(str(tmp_path / "one.txt"), tmp_path / "cache")
    config.data.update(tokenizer="sentencepiece", vocab_size=300)
    tokenized = load_tokenized(parse(config).data)
    assert len(tokenized.splits["train"].tokens) < 0.5 * tokenized.splits["train"].bytes
