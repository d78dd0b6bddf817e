"""Corpora of Hugging Face datasets: local files of three kinds, splits that exist or are held out, and bad input."""

import http.server
import json
import pathlib
import shutil
import threading
import time
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import documents, small_config

from flash_lm.config import parse
from flash_lm.data import hub, hugging_face
from flash_lm.data.corpus import SPLITS
from flash_lm.data.token_cache import load_corpus, load_tokenized
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


def test_missing_splits_are_held_out_by_document(tmp_path):
    write_parquet(tmp_path / "all.parquet", ROWS)
    corpus = load_corpus(data_config(tmp_path / "*.parquet", tmp_path / "cache"))
    parts = [documents(corpus, split) for split in SPLITS]
    assert sorted(sum(parts, [])) == sorted(ROWS)
    assert [len(part) for part in parts] == [54, 3, 3]
    assert parts[0] == [row for row in ROWS if row in parts[0]]


@pytest.mark.parametrize(("files", "hosts"), [(1, 1), (2, 2), (2, 4), (3, 2)])
def test_what_a_stream_holds_out_no_host_trains_on(tmp_path, files, hosts):
    """Whole files go to a host where they divide evenly, so a hold-out by place would be another on each."""
    rows = [f"document {i}" for i in range(900)]
    for i in range(files):
        write_json(tmp_path / f"part-{i}.jsonl", [*rows[i::files], rows[0]])
    corpus = load_corpus(data_config(tmp_path / "*.jsonl", tmp_path / "cache", streaming=True))
    trained = [set(corpus.stream.share(h, hosts).documents(0)) for h in range(hosts)]
    validation, test = (documents(corpus, split) for split in SPLITS[1:])
    assert 3 < len(validation) < 30 and 3 < len(test) < 30
    assert set.union(*trained) | set(validation) | set(test) == set(rows)
    assert not set.union(*trained) & set(validation + test) and not set(validation) & set(test)
    assert set(documents(corpus, "train")) == set.union(*trained)


def test_a_long_stream_holds_out_no_more_than_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face, "_STREAM_HELD_OUT", 4)
    write_json(tmp_path / "all.jsonl", [f"document {i}" for i in range(2000)])
    corpus = load_corpus(data_config(tmp_path / "all.jsonl", tmp_path / "cache", streaming=True))
    assert [len(documents(corpus, split)) for split in SPLITS[1:]] == [4, 4]


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
        assert hub.is_reachable()
        thread.join()
    assert not hub.is_reachable()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"split": "dev"}, "^no split dev in the data set: --config.data.split is one of train"),
        ({"text_column": "body"}, "^no column body of text in the train split of the data set: .* is one of text$"),
        ({"text_column": "number"}, "no column number of text"),
        ({"path": "{tmp}/none*.parquet"}, "no file matches data.path="),
        ({"path": "{tmp}/notes.md"}, "is .md: give one of .parquet, .arrow"),
        ({"path": "{tmp}/broken.parquet"}, "cannot load data.path="),
        ({"path": "{tmp}/empty"}, "cannot load data.path="),
        ({"path": "{tmp}/late.parquet"}, "column text holds int 1: choose a column of text"),
        ({"path": "{tmp}/blank.parquet", "streaming": True}, "^the train split has no text in column text"),
        (
            {"path": "{tmp}/two.parquet", "streaming": True},
            "^corpus two is too small: its validation split",
        ),
        ({"path": "{tmp}/splits/*.parquet"}, "would train on the files of train and test: give their folder"),
        ({"path": "{tmp}/uneven"}, "cannot load data.path=.*column names"),
        ({"path": "{tmp}/two.parquet"}, "has 2 rows, too few to hold out validation and test"),
        ({"path": "", "name": "someone/something"}, "--config.data.corpus=stdlib"),
        ({"path": "", "name": "someone/something", "streaming": True}, "the hub cannot be reached"),
    ],
)
def test_bad_input_ends_in_one_line_at_once(tmp_path, keys, expected, capfd):
    write_parquet(tmp_path / "all.parquet", ROWS)
    write_parquet(tmp_path / "two.parquet", ROWS[:2])
    (tmp_path / "notes.md").write_text("notes")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    for name in ("empty", "splits", "uneven"):
        (tmp_path / name).mkdir()
    pq.write_table(pa.table({"text": pa.array([None, 1, *range(60)], pa.int64())}), tmp_path / "late.parquet")
    write_parquet(tmp_path / "blank.parquet", ["", None, " "])
    for split in ("train", "test"):
        write_parquet(tmp_path / "splits" / f"{split}.parquet", ROWS)
        column = {"train": "text", "test": "body"}[split]
        (tmp_path / "uneven" / f"{split}.jsonl").write_text(json.dumps({column: "x"}) + "\n")
    keys = {"path": str(tmp_path / "all.parquet")} | keys
    config = data_config(cache=tmp_path / "cache", **keys | {"path": keys["path"].replace("{tmp}", str(tmp_path))})
    start = time.monotonic()
    with pytest.raises(InputError, match=expected) as error:
        load_tokenized(config)
    assert time.monotonic() - start < 10
    assert "\n" not in str(error.value)
    # Nothing beside it but our own progress line, which is wiped away.
    others = [part for part in capfd.readouterr().err.split("\r") if part.strip() and "tokenise" not in part]
    assert not others
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("name", ["../../up", "/absolute", "..", "a/../../b", "google/wiki40b"])
@pytest.mark.parametrize("config", ["en", "../en", ""])
def test_two_folders_never_share_the_name_of_a_data_set(name, config):
    found = hugging_face._name(SimpleNamespace(name=name, config=config, path=None))
    folder = pathlib.Path("cache", f"{found}-key")
    assert "/" not in found and folder.resolve().parent == folder.parent.resolve()
