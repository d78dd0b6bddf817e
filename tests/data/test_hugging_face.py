"""Corpora of Hugging Face datasets: local files of three kinds, splits that exist or are held out, and bad input."""

import http.server
import json
import pathlib
import shutil
import threading
import time

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import small_config

from flash_lm.config import parse
from flash_lm.data import hugging_face
from flash_lm.data.corpora import load_corpus
from flash_lm.data.corpus import SPLITS
from flash_lm.data.token_cache import load_tokenized
from flash_lm.errors import InputError

ROWS = [f"document {i}, ünd\nits second line {'x' * (i % 7)}\n" for i in range(60)]


@pytest.fixture(scope="module", autouse=True)
def _datasets_cache(tmp_path_factory):
    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


def table(rows) -> pa.Table:
    return pa.table({"text": pa.array(rows, pa.string()), "number": list(range(len(rows)))})


def write_parquet(path, rows):
    pq.write_table(table(rows), path, row_group_size=7)


def write_arrow(path, rows):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table(rows).schema) as writer:
        writer.write_table(table(rows))


def write_json(path, rows):
    path.write_text("".join(json.dumps({"text": row, "number": i}) + "\n" for i, row in enumerate(rows)))


def data_config(path, cache, **keys):
    config = small_config("", cache)
    config.data.update(corpus="hf", path=str(path), **keys)
    return parse(config).data


def documents(corpus, split) -> list[str]:
    found = []
    for piece in corpus.pieces(split):
        if piece.begins_document:
            found.append("")
        found[-1] += piece.text
    return found


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize(
    ("suffix", "write"), [("parquet", write_parquet), ("arrow", write_arrow), ("jsonl", write_json)]
)
def test_a_folder_of_splits(tmp_path, suffix, write, streaming):
    parts = {"train": ROWS[:40], "validation": ROWS[40:50], "test": ROWS[50:]}
    for split, rows in parts.items():
        write(tmp_path / f"{split}.{suffix}", rows)
    corpus = load_corpus(data_config(tmp_path, tmp_path / "cache", streaming=streaming))
    for split, rows in parts.items():
        assert documents(corpus, split) == rows
        assert corpus.size(split) == (None if streaming else sum(len(row.encode()) for row in rows))
    assert corpus.name == tmp_path.name
    assert (corpus.stream is not None) == streaming


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_missing_splits_are_held_out_by_document(tmp_path, streaming, monkeypatch):
    monkeypatch.setattr(hugging_face, "_STREAMED_HELD_OUT", 4)
    write_parquet(tmp_path / "all.parquet", ROWS)
    corpus = load_corpus(data_config(tmp_path / "*.parquet", tmp_path / "cache", streaming=streaming))
    parts = [documents(corpus, split) for split in SPLITS]
    assert sorted(sum(parts, [])) == sorted(ROWS)
    assert [len(part) for part in parts] == ([52, 4, 4] if streaming else [54, 3, 3])
    assert parts[0] == [row for row in ROWS if row in parts[0]]


def test_only_the_missing_split_is_held_out(tmp_path):
    write_parquet(tmp_path / "train.parquet", ROWS[:40])
    write_parquet(tmp_path / "test.parquet", ROWS[40:])
    corpus = load_corpus(data_config(tmp_path, tmp_path / "cache"))
    assert documents(corpus, "test") == ROWS[40:]
    assert sorted(documents(corpus, "train") + documents(corpus, "validation")) == sorted(ROWS[:40])


def test_another_split_and_another_column(tmp_path):
    for split, rows in {"train": ROWS[:30], "validation": ROWS[30:]}.items():
        pq.write_table(pa.table({"body": rows, "text": ["no"] * 30}), tmp_path / f"{split}.parquet")
    config = data_config(tmp_path, tmp_path / "cache", split="validation", text_column="body")
    corpus = load_corpus(config)
    assert sorted(sum((documents(corpus, split) for split in SPLITS), [])) == sorted(ROWS[30:])


def test_rows_without_text_are_left_out(tmp_path):
    write_parquet(tmp_path / "all.parquet", [*ROWS, "", None, " \n", "\t"])
    corpus = load_corpus(data_config(tmp_path / "all.parquet", tmp_path / "cache"))
    assert sorted(sum((documents(corpus, split) for split in SPLITS), [])) == sorted(ROWS)


def test_the_fingerprint_is_of_the_content(tmp_path):
    def fingerprint(name, rows):
        write_parquet(tmp_path / f"{name}.parquet", rows)
        return load_corpus(data_config(tmp_path / f"{name}.parquet", tmp_path / "cache")).fingerprint

    first = fingerprint("a", ROWS)
    assert fingerprint("b", ROWS) == first
    assert fingerprint("a", ROWS[::-1]) != first


def test_counts_are_of_the_text(tmp_path):
    write_parquet(tmp_path / "all.parquet", ROWS)
    stores = load_tokenized(data_config(tmp_path / "all.parquet", tmp_path / "cache")).splits.values()
    assert sum(store.bytes for store in stores) == sum(len(row.encode()) for row in ROWS)
    assert sum(store.words for store in stores) == sum(len(row.split()) for row in ROWS)
    assert sum(len(store.starts) - 1 for store in stores) == len(ROWS)


@pytest.fixture
def downloaded(tmp_path):
    """A data set of the hub that an earlier run has downloaded, with a config en."""
    cache = pathlib.Path(datasets.config.HF_DATASETS_CACHE)
    (tmp_path / "something").mkdir()
    for split, rows in {"train": ROWS[:50], "test": ROWS[50:]}.items():
        write_parquet(tmp_path / "something" / f"{split}.parquet", rows)
    builder = datasets.load_dataset_builder(str(tmp_path / "something"))
    builder.download_and_prepare()
    folder = cache / "someone___something" / "en" / "0.0.0" / "0123abcd"
    shutil.copytree(builder.cache_dir, folder)
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"config_name": "en"}))
    yield "someone/something"
    shutil.rmtree(cache / "someone___something")


def test_a_downloaded_data_set_needs_no_network(tmp_path, downloaded):
    corpus = load_corpus(data_config("", tmp_path / "cache", name=downloaded, config="en"))
    assert documents(corpus, "test") == ROWS[50:]
    assert sorted(documents(corpus, "train") + documents(corpus, "validation")) == sorted(ROWS[:50])
    assert corpus.name == "someone--something-en"
    again = load_corpus(data_config("", tmp_path / "cache", name=downloaded))
    assert again.fingerprint == corpus.fingerprint  # its only config
    with pytest.raises(InputError, match="cannot load data.name=.* for config 'de' .*'en'"):
        load_corpus(data_config("", tmp_path / "cache", name=downloaded, config="de"))


def test_whether_the_hub_answers(monkeypatch):
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hugging_face._hub_is_reachable()
        thread.join()
    assert not hugging_face._hub_is_reachable()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"split": "dev"}, "no split dev in the data set: --config.data.split is one of train"),
        ({"text_column": "body"}, "no column body of text in the data set: --config.data.text_column is one of text"),
        ({"text_column": "number"}, "no column number of text"),
        ({"path": "{tmp}/none*.parquet"}, "no file matches data.path="),
        ({"path": "{tmp}/notes.md"}, "is .md: give one of .parquet, .arrow"),
        ({"path": "{tmp}/broken.parquet"}, "cannot load data.path="),
        ({"path": "{tmp}/empty"}, "cannot load data.path="),
        ({"path": "{tmp}/two.parquet"}, "has 2 rows, too few to hold out validation and test"),
        ({"path": "", "name": "someone/something"}, "--config.data.corpus=stdlib"),
        ({"path": "", "name": "someone/something", "streaming": True}, "the hub cannot be reached"),
    ],
)
def test_bad_input_ends_in_one_line_at_once(tmp_path, keys, expected):
    write_parquet(tmp_path / "all.parquet", ROWS)
    write_parquet(tmp_path / "two.parquet", ROWS[:2])
    (tmp_path / "notes.md").write_text("notes")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "empty").mkdir()
    keys = {"path": str(tmp_path / "all.parquet")} | keys
    config = data_config(cache=tmp_path / "cache", **keys | {"path": keys["path"].replace("{tmp}", str(tmp_path))})
    start = time.monotonic()
    with pytest.raises(InputError, match=expected) as error:
        load_tokenized(config)
    assert time.monotonic() - start < 10
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()
