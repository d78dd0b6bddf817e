"""The token cache: written once per content, completely or not at all."""

import dataclasses
import itertools
import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from small import ROOT, check_permissions, small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.data import text_files, token_cache
from flash_lm.data.token_cache import load_tokenized
from flash_lm.errors import InputError


@pytest.fixture
def config(tmp_path):
    return parse(small_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")).data


def test_the_tokens_are_those_of_the_documents(config, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", 64)  # documents then have several pieces
    monkeypatch.setattr(token_cache, "_BATCH_BYTES", 200)
    tokenized = load_tokenized(config)
    corpus, tokenizer = token_cache.load_corpus(config), tokenized.tokenizer
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


def test_a_corpus_is_tokenized_once(config, monkeypatch):
    first = load_tokenized(config)
    monkeypatch.setattr(token_cache, "_tokenize", None)  # would fail if called
    second = load_tokenized(config)
    assert isinstance(second.splits["train"].tokens, np.memmap)
    assert (first.splits["train"].tokens == second.splits["train"].tokens).all()


def test_the_cache_respects_the_umask(config, tmp_path):
    with check_permissions(tmp_path / "cache"):
        load_tokenized(config)


def test_changed_content_is_tokenized_again(config, tmp_path):
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


@pytest.mark.parametrize(
    "damage", ["cut", *(pytest.param(x, marks=pytest.mark.slow("another kind of damage")) for x in ("emptied", "gone"))]
)
@pytest.mark.parametrize("name", ["train.tokens", "validation.starts.npy", "info.json", "tokenizer"])
def test_a_damaged_cache_is_made_again(config, tmp_path, caplog, damage, name):
    config = dataclasses.replace(config, tokenizer="sentencepiece", vocab_size=300)
    first = load_tokenized(config)
    before = {split: np.array(store.tokens) for split, store in first.splits.items()}
    (path,) = (tmp_path / "cache").glob("tokenizer-*/*.model" if name == "tokenizer" else f"text-*/{name}")
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    with caplog.at_level(logging.WARNING, "flash_lm"):
        second = load_tokenized(config)
    assert "is damaged, making it again" in caplog.text
    for split, store in second.splits.items():
        assert np.array_equal(store.tokens, before[split]) and store.words == first.splits[split].words
    caplog.clear()
    load_tokenized(config)
    assert not caplog.records


LOAD = """
import resource, sys, time
from flash_lm.config.experiment import parse
from flash_lm.data.token_cache import load_tokenized
sys.path.insert(0, "tests")
from small import small_config
config = small_config(sys.argv[1], sys.argv[2])
config.data.update(tokenizer=sys.argv[3], vocab_size=300)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("ready", flush=True)
sys.stdin.readline()
tokenized = load_tokenized(parse(config).data)
store = tokenized.splits["train"]
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(len(store.starts) - 1, len(store.tokens), int(store.tokens[:1000000].astype(int).sum()), used // 1024)
"""


def start_loading(path, cache, tokenizer: str) -> subprocess.Popen:
    words = [sys.executable, "-c", LOAD, str(path), str(cache), tokenizer]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow("starts processes")
def test_processes_that_build_a_cache_at_the_same_time_agree(tmp_path):
    path = write_corpus(tmp_path / "corpus", documents=60, lines=200)
    processes = [start_loading(path, tmp_path / "cache", "sentencepiece") for _ in range(3)]
    for process in processes:
        print(file=process.stdin, flush=True)
    outputs = {process.communicate(timeout=300)[0].rsplit(" ", 1)[0] for process in processes}
    assert len(outputs) == 1 and all(process.returncode == 0 for process in processes)
    assert len(list((tmp_path / "cache").iterdir())) == 2  # a tokenizer and a corpus, and no partial files


@pytest.mark.slow("starts processes with large texts")
@pytest.mark.parametrize(("tokenizer", "megabytes"), [("bytes", 200), ("sentencepiece", 30)])
def test_one_document_on_one_line_is_tokenized_in_bounded_memory(tmp_path, tokenizer, megabytes):
    draw = np.random.default_rng(0)
    words = np.array([b"the ", b"cat ", b"sees ", "naïve ".encode(), "猫 ".encode(), b"12 "])
    with open(tmp_path / "line.txt", "wb") as file:
        while file.tell() < megabytes << 20:
            file.write(b"".join(words[draw.integers(len(words), size=50_000)]))
    process = start_loading(tmp_path / "line.txt", tmp_path / "cache", tokenizer)
    out, _ = process.communicate("\n", timeout=600)
    documents, tokens, _, used = map(int, out.split())
    assert documents == 1
    assert tokens > (0.85 * (megabytes << 20) if tokenizer == "bytes" else megabytes << 17)
    assert used < 500  # megabytes, of which 200 train a tokenizer


@pytest.mark.slow("tokenizes a hundred thousand documents")
def test_a_hundred_thousand_documents_of_one_token(config, tmp_path):
    rows = "".join(json.dumps({"text": letter}) + "\n" for letter in "abcde" * 20_000)
    (tmp_path / "rows.jsonl").write_text(rows)
    config = dataclasses.replace(config, corpus="hf", path=str(tmp_path / "rows.jsonl"), tokenizer="bytes")
    splits = load_tokenized(config).splits
    assert sum(len(store.starts) - 1 for store in splits.values()) == 100_000
    for store in splits.values():
        assert (np.diff(store.starts) == 3).all() and store.bytes == store.words == len(store.starts) - 1


def test_documents_of_white_space_are_left_out(config, tmp_path):
    texts = ["", "first", "", " ", "second", "\n", ""] * 50
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = dataclasses.replace(config, corpus="hf", path=str(tmp_path / "rows.jsonl"), tokenizer="bytes")
    tokenized = load_tokenized(config)
    for store in tokenized.splits.values():
        assert (np.diff(store.starts) > 2).all()
    assert sum(store.bytes for store in tokenized.splits.values()) == 50 * len("first" + "second")


def test_a_corpus_that_changes_during_tokenization_is_not_cached(config, tmp_path, monkeypatch):
    tokenize = token_cache._tokenize

    def change_and_tokenize(corpus, split, *rest):
        if split == "test":
            write_corpus(tmp_path / "corpus", seed=1)
        return tokenize(corpus, split, *rest)

    monkeypatch.setattr(token_cache, "_tokenize", change_and_tokenize)
    with pytest.raises(InputError, match="changed while it was tokenised|shrank"):
        load_tokenized(config)
    assert not list((tmp_path / "cache").iterdir())


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


def test_a_tokenizer_of_hugging_face_is_one_file(config, tmp_path):
    """As its library saves it; the ids equal those of the library, with the usual names of special tokens."""
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<s>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    theirs.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    theirs.save(str(tmp_path / "mine.json"))
    settings = small_config(config.path, tmp_path / "cache")
    settings.data.update(tokenizer="hf", tokenizer_path=str(tmp_path / "mine.json"))
    corpus = load_tokenized(parse(settings).data)
    store = corpus.splits["test"]
    first = store.tokens[store.starts[0] : store.starts[1]].tolist()
    text = corpus.tokenizer.decode(first)
    ids = [theirs.token_to_id("<s>"), *theirs.encode(text).ids, theirs.token_to_id("<|endoftext|>")]
    assert first == ids


def test_a_tokenizer_is_trained_on_text_without_line_ends(tmp_path):
    (tmp_path / "one.txt").write_text("all of this is one long line " * 20_000)
    config = small_config(str(tmp_path / "one.txt"), tmp_path / "cache")
    config.data.update(tokenizer="sentencepiece", vocab_size=300)
    tokenized = load_tokenized(parse(config).data)
    assert len(tokenized.splits["train"].tokens) < 0.5 * tokenized.splits["train"].bytes


def test_a_cache_from_elsewhere_runs_no_code(config, tmp_path, caplog):
    """An array of objects is pickled, and reading it would run its code."""

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    first = load_tokenized(config)
    (path,) = (tmp_path / "cache").glob("text-*/train.starts.npy")
    np.save(path, np.array([Evil()], dtype=object), allow_pickle=True)
    second = load_tokenized(config)
    assert not (tmp_path / "owned").exists() and "making it again" in caplog.text
    assert np.array_equal(first.splits["train"].starts, second.splits["train"].starts)
