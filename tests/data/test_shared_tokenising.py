"""Hosts that tokenise together write the files of one host, and end together when one of them fails."""

import dataclasses
import json
import logging
import pathlib
import shutil

import numpy as np
import pytest
from hosts_in_threads import run_on_hosts
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.data import shared_tokenising, text_files, token_cache, tokenising_progress
from flash_lm.data.token_cache import load_tokenized
from flash_lm.data.tokenizers import train_sentencepiece
from flash_lm.errors import InputError, PassingError, RunError


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Documents in several pieces, batches of some pieces, and blocks of some documents; one is larger than a block."""
    for module, name in ((text_files, "_BLOCK"), (token_cache, "_BATCH_BYTES"), (shared_tokenising, "_BLOCK")):
        monkeypatch.setattr(module, name, {"_BATCH_BYTES": 150}.get(name, 64 if module is text_files else 300))
    monkeypatch.setattr(shared_tokenising, "_MEET_EVERY_S", 0)  # after each block
    path = write_corpus(tmp_path / "corpus")
    pathlib.Path(path).with_name("long.txt").write_text("a line\n" * 200 + "and one without an end")
    return parse(small_config(path, tmp_path / "alone")).data


def files(cache) -> dict[str, bytes]:
    (folder,) = (path for path in pathlib.Path(cache).iterdir() if not path.name.startswith("tokenizer-"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_blocks_are_whole_documents(config):
    pieces = list(token_cache.load_corpus(config).pieces("train"))
    blocks = [list(block) for _, block in shared_tokenising._blocks(pieces)]
    assert sum(blocks, []) == pieces and 6 < len(blocks) < 15
    assert all(block[0].begins_document for block in blocks)
    assert max(sum(len(piece.text) for piece in block) for block in blocks) > 1000


@pytest.mark.parametrize("hosts", [2, 3, 15])
def test_the_files_are_those_of_one_host(config, tmp_path, monkeypatch, hosts):
    load_tokenized(config)
    together = dataclasses.replace(config, cache_dir=str(tmp_path / "together"))
    read = token_cache._read_splits
    results = run_on_hosts(monkeypatch, hosts, lambda number: load_tokenized(together))
    assert files(tmp_path / "together") == files(tmp_path / "alone")
    (name,) = (path.name for path in (tmp_path / "together").iterdir())
    expected = read(tmp_path / "alone" / name, ("train",), np.uint16)["train"]
    for result in results:
        assert np.array_equal(result.splits["train"].tokens, expected.tokens), result


def test_a_mixture_is_tokenised_together(config, tmp_path, monkeypatch):
    more = write_corpus(tmp_path / "more", documents=9, seed=1)
    config = dataclasses.replace(config, path=None, mixture=((config.path, 0.5), (more, 0.5)))
    load_tokenized(config)
    together = dataclasses.replace(config, cache_dir=str(tmp_path / "together"))
    run_on_hosts(monkeypatch, 2, lambda number: load_tokenized(together))
    assert files(tmp_path / "together") == files(tmp_path / "alone")
    counts = json.loads(files(tmp_path / "together")["info.json"])["counts"]["train"]
    assert len(counts["part_documents"]) == 2


def failing(error: Exception, after: int):
    """A function that encodes as `encode` does, and fails in the block after so many."""
    encode, calls = shared_tokenising.encode, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise error
        return encode(*arguments)

    return fail


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (OSError(28, "No space left on device"), RunError, "host 1: .*No space left on device"),
        (MemoryError(), PassingError, "host 1: MemoryError"),
        (PassingError("no route"), PassingError, "host 1: no route"),
        (InputError("row 7 is no text"), InputError, "host 1: row 7 is no text"),
    ],
)
def test_a_host_that_fails_ends_all(config, tmp_path, monkeypatch, error, kind, line, after):
    fails = failing(error, after)
    encode = shared_tokenising.encode

    def on_host(number: int):
        return load_tokenized(config)

    monkeypatch.setattr(
        shared_tokenising,
        "encode",
        lambda *arguments: (fails if shared_tokenising.jax.process_index() == 1 else encode)(*arguments),
    )
    results = run_on_hosts(monkeypatch, 3, on_host)
    assert results[1] is error
    for other in (results[0], results[2]):
        assert type(other) is kind
        with pytest.raises(kind, match=line):
            raise other
    assert list((tmp_path / "alone").iterdir()) == []


def test_hosts_with_different_text_are_refused(config, tmp_path, monkeypatch):
    """As with a file that one of them does not see yet."""
    kind = type(token_cache.load_corpus(config))
    pieces = kind.pieces

    def fewer(corpus, split):
        every = list(pieces(corpus, split))
        return iter(every[: len(every) // 3] if shared_tokenising.jax.process_index() else every)

    monkeypatch.setattr(kind, "pieces", fewer)
    results = run_on_hosts(monkeypatch, 2, lambda number: load_tokenized(config))
    assert all("the hosts have read different text" in str(error) for error in results), results


@pytest.mark.parametrize("differing", ["corpus", "tokenizer"])
def test_hosts_with_other_words_are_refused_before_they_mix_them(config, tmp_path, monkeypatch, differing):
    """Files of each host, of the same length: nothing is published that a later run would read."""
    other = pathlib.Path(write_corpus(tmp_path / "other"))
    if differing == "corpus":
        shutil.copy(pathlib.Path(config.path).with_name("long.txt"), other.with_name("long.txt"))
        other.with_name("00.txt").write_text(other.with_name("00.txt").read_text()[::-1])
        configs = [config, dataclasses.replace(config, path=str(other))]
    else:
        paths = [tmp_path / f"{number}.model" for number in range(2)]
        for path, size in zip(paths, (300, 301), strict=True):
            lines = (file.read_text() for file in other.parent.glob("*.txt"))
            path.write_bytes(train_sentencepiece(lines, size)._model)
        configs = [dataclasses.replace(config, tokenizer="sentencepiece", tokenizer_path=str(path)) for path in paths]
    results = run_on_hosts(monkeypatch, 2, lambda number: load_tokenized(configs[number]))
    assert all(f"the hosts differ in {differing}: " in str(error) for error in results), results
    assert not (tmp_path / "alone").exists()


def test_hosts_that_do_not_share_the_cache_work_alone_and_say_so(config, tmp_path, monkeypatch, caplog):
    configs = [dataclasses.replace(config, cache_dir=str(tmp_path / f"of-{number}")) for number in range(2)]
    with caplog.at_level(logging.WARNING, "flash_lm"):
        run_on_hosts(monkeypatch, 2, lambda number: load_tokenized(configs[number]))
    (record,) = caplog.records
    assert "is not the same folder on all hosts" in record.getMessage()
    assert files(tmp_path / "of-0") == files(tmp_path / "of-1")


@pytest.mark.parametrize(("shared", "trained"), [(True, 1), (False, 2)])
def test_the_first_host_trains_the_tokenizer_if_the_cache_is_shared(config, tmp_path, monkeypatch, shared, trained):
    calls = []
    monkeypatch.setattr(
        token_cache, "train_sentencepiece", lambda *words: calls.append(words) or train_sentencepiece(*words)
    )
    config = dataclasses.replace(config, tokenizer="sentencepiece", vocab_size=300)
    caches = [tmp_path / ("shared" if shared else f"of-{number}") for number in range(2)]
    on_host = lambda number: load_tokenized(dataclasses.replace(config, cache_dir=str(caches[number])))
    first, second = run_on_hosts(monkeypatch, 2, on_host)
    assert first.tokenizer.fingerprint == second.tokenizer.fingerprint and len(calls) == trained
    assert files(caches[0]) == files(caches[1])
    run_on_hosts(monkeypatch, 2, on_host)  # it is kept
    assert len(calls) == trained


def test_a_cache_that_one_host_lacks_or_finds_damaged_is_made_again(config, tmp_path, monkeypatch):
    load_tokenized(config)
    before = files(tmp_path / "alone")
    (folder,) = (tmp_path / "alone").iterdir()
    (folder / "train.tokens").write_bytes(b"")
    run_on_hosts(monkeypatch, 2, lambda number: load_tokenized(config))
    assert files(tmp_path / "alone") == before


def test_progress_is_said_now_and_then_with_the_time_left(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(tokenising_progress.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, "flash_lm"):
        with tokenising_progress.Progress("wiki train", 4 * 10**9) as progress:
            for seconds in range(0, 100, 10):
                now[0] = 100.0 + seconds
                progress.show(seconds * 10**7)
        with tokenising_progress.Progress("wiki train", None, shown=False) as progress:
            now[0] += 100
            progress.show(1)
    assert [record.getMessage() for record in caplog.records] == [
        "tokenise wiki train: 300.0 MB of 4.0 GB, about 6 min left",
        "tokenise wiki train: 600.0 MB of 4.0 GB, about 6 min left",
        "tokenise wiki train: 900.0 MB of 4.0 GB, about 5 min left",
    ]


def test_a_large_corpus_is_announced_with_an_estimate(config, monkeypatch, caplog):
    monkeypatch.setattr(token_cache, "_LARGE", 1000)
    with caplog.at_level(logging.INFO, "flash_lm"):
        load_tokenized(config)
    size = sum(len(piece.text.encode()) for piece in token_cache.load_corpus(config).pieces("train"))
    assert f"tokenise text train: {size / 1000:.1f} kB, about 0 s" in [record.getMessage() for record in caplog.records]
