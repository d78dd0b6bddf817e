"""Corpora of Hugging Face data sets: three kinds of local files, existing or held-out splits, and bad input."""

import gzip
import hashlib
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

from flash_lm.config.experiment import parse
from flash_lm.data import hub, hugging_face
from flash_lm.data.corpus import SPLITS, UNSPLIT
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
def test_no_host_trains_on_held_out_text_of_a_stream(tmp_path, files, hosts):
    """A host reads complete files if they divide evenly, so a hold-out by index would differ between hosts."""
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


def test_the_hold_out_of_a_long_stream_is_bounded(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow", "csv"])
def test_shards_may_differ_in_columns_that_are_not_read(tmp_path, suffix, streaming):
    first = pa.table({"text": ROWS[:30], "meta": list(range(30))})
    others = pa.table({"more": [[1]] * 30, "meta": [{"a": "b"}] * 30, "text": ROWS[30:]})
    if suffix == "csv":
        others = pa.table({"more": ["m"] * 30, "text": ROWS[30:], "meta": ["word"] * 30})
    for i, rows in enumerate((first, others)):
        path = tmp_path / f"part-{i}.{suffix}"
        if suffix == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
        elif suffix == "csv":
            rows.to_pandas().to_csv(path, index=False)
        elif suffix == "parquet":
            pq.write_table(rows, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
                writer.write_table(rows)
    corpus = load_corpus(data_config(tmp_path, tmp_path / "cache", streaming=streaming))
    assert sorted(sum((documents(corpus, split) for split in SPLITS), [])) == sorted(ROWS)


def test_a_first_file_whose_texts_are_all_missing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null, "n": 1}\n' * 20)
    write_json(tmp_path / "b.jsonl", ROWS)
    assert documents(load_corpus(data_config(tmp_path, tmp_path / "cache")), UNSPLIT) == ROWS


def test_a_card_without_files_changes_nothing(tmp_path):
    """Most data sets on the hub have a card."""
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nabout")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS[:40]))
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps({"text": row, "z": 1}) + "\n" for row in ROWS[40:]))
    corpus = load_corpus(data_config(tmp_path, tmp_path / "cache", config="en"))
    assert documents(corpus, "validation") == ROWS[40:]


def test_files_of_unknown_kinds_are_left_out_with_a_message(tmp_path, caplog):
    write_json(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "README.md").write_text("about")
    assert documents(load_corpus(data_config(tmp_path, tmp_path / "cache")), UNSPLIT) == ROWS
    assert "files of other kinds are left out: 1, such as" in caplog.text and "notes.txt" in caplog.text


def test_another_hold_out_is_another_corpus(tmp_path):
    """Older runs counted rows without text, too; such a run must not be tested on its training data."""
    path = tmp_path / "all.parquet"
    for rows, as_before in (([*ROWS[:59], None], False), (ROWS, True)):
        write_parquet(path, rows)
        corpus = load_corpus(data_config(path, tmp_path / "cache"))
        content = {"train": [hashlib.sha256(path.read_bytes()).hexdigest()]}
        before = hashlib.sha256(repr([content, "train", "text", False]).encode()).hexdigest()
        assert (corpus.fingerprint == before) == as_before


def test_another_column_of_the_same_files_is_read_again(tmp_path):
    """The library caches what it has read."""
    pq.write_table(pa.table({"text": ROWS, "other": ROWS[::-1]}), tmp_path / "a.parquet")
    for column, rows in {"text": ROWS, "other": ROWS[::-1]}.items():
        corpus = load_corpus(data_config(tmp_path / "a.parquet", tmp_path / "cache", text_column=column))
        assert documents(corpus, UNSPLIT) == rows


def test_which_rows_have_text(tmp_path, monkeypatch):
    """By Python's definition of white space, for all characters."""
    monkeypatch.setattr(hugging_face, "_LOOKED_AT", 7)
    rows = ["a", "", None, " \t", "\u3000\xa0", "\x1c\x1f", "猫", "é ", "\x0b", "\u200b", *ROWS[:20], "\n", "..."]
    write_parquet(tmp_path / "all.parquet", rows)
    corpus = load_corpus(data_config(tmp_path / "all.parquet", tmp_path / "cache"))
    assert corpus._documents.tolist() == [i for i, text in enumerate(rows) if (text or "").strip()]


def test_half_of_the_rows_without_text(tmp_path):
    """The hold-out is taken from the rows with text, wherever the blank ones are."""
    rows = [text for row in ROWS[:30] for text in (None, row)]
    write_parquet(tmp_path / "all.parquet", rows)
    corpus = load_corpus(data_config(tmp_path / "all.parquet", tmp_path / "cache"))
    assert [len(documents(corpus, split)) for split in SPLITS] == [26, 2, 2]


@pytest.mark.parametrize("path", ["corpus[1].jsonl", "[v2] data", "[v2] data/*.jsonl"])
def test_an_existing_path_is_not_a_glob(tmp_path, path):
    (tmp_path / "[v2] data").mkdir()
    write_json(tmp_path / "corpus[1].jsonl", ROWS)
    write_json(tmp_path / "[v2] data" / "a.jsonl", ROWS)
    assert documents(load_corpus(data_config(tmp_path / path, tmp_path / "cache")), UNSPLIT) == ROWS


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl"])
def test_compressed_files_are_read_by_the_kind_of_their_content(tmp_path, kind):
    text = {
        "csv": "text\n" + "".join(f'"{row}"\n' for row in ROWS),
        "json": json.dumps([{"text": row} for row in ROWS]),
        "jsonl": "".join(json.dumps({"text": row}) + "\n" for row in ROWS),
    }[kind]
    (tmp_path / f"a.{kind}.gz").write_bytes(gzip.compress(text.encode()))
    assert documents(load_corpus(data_config(tmp_path, tmp_path / "cache")), UNSPLIT) == ROWS


def test_a_glob_honours_names_and_a_file_is_read_once(tmp_path):
    (tmp_path / "folder").mkdir()
    for split, rows in {"train": ROWS[:40], "dev": ROWS[40:50], "test": ROWS[50:]}.items():
        write_parquet(tmp_path / "folder" / f"{split}.parquet", rows)
    (tmp_path / "folder" / "again").symlink_to(tmp_path / "folder")
    for path in ("folder/*.parquet", "folder", "folder/**/*.parquet"):
        corpus = load_corpus(data_config(tmp_path / path, tmp_path / "cache"))
        assert [documents(corpus, split) for split in SPLITS] == [ROWS[:40], ROWS[40:50], ROWS[50:]]


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
def downloaded_dataset(tmp_path):
    """A data set of the hub that an earlier run downloaded, with a config `en`."""
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


def test_a_downloaded_data_set_needs_no_network(tmp_path, downloaded_dataset):
    corpus = load_corpus(data_config("", tmp_path / "cache", name=downloaded_dataset, config="en"))
    assert documents(corpus, "test") == ROWS[50:]
    assert sorted(documents(corpus, "train") + documents(corpus, "validation")) == sorted(ROWS[:50])
    assert corpus.name == "someone--something-en"
    again = load_corpus(data_config("", tmp_path / "cache", name=downloaded_dataset))
    assert again.fingerprint == corpus.fingerprint  # its only config
    with pytest.raises(InputError, match="cannot load data.name=.* for config 'de' .*'en'"):
        load_corpus(data_config("", tmp_path / "cache", name=downloaded_dataset, config="de"))


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
        ({"text_column": "number"}, "column number holds int, not text, in the train split .*: .* is one of text"),
        ({"path": "{tmp}/nested.parquet"}, "column text holds dict, not text, .*: none of its columns holds text$"),
        ({"path": "{tmp}/bytes.parquet"}, "column text holds bytes, not text, .*: none of its columns holds text$"),
        ({"path": "{tmp}/none*.parquet"}, "no file matches data.path="),
        ({"path": "{tmp}/notes.md"}, "has text files, each a document: use --config.data.corpus=text$"),
        ({"path": "{tmp}/notes"}, "has text files, each a document: use --config.data.corpus=text$"),
        ({"path": "{tmp}/page.xml"}, "is .xml: give one of .parquet, .arrow"),
        ({"path": "{tmp}/packed.parquet.gz"}, "is .parquet.gz: give one of .parquet, .arrow"),
        ({"path": "{tmp}/kinds"}, r"has files of different kinds, .csv, .parquet: name those of one kind, such as '.*"),
        ({"path": "{tmp}/broken.parquet"}, "cannot load data.path="),
        ({"path": "{tmp}/empty"}, "no file matches data.path="),
        ({"path": "{tmp}/readme"}, "no file matches data.path="),
        ({"path": "{tmp}/card"}, "cannot load data.path="),
        ({"path": "{tmp}/lacks/*.jsonl"}, "some of the files have no column text: leave them out"),
        ({"path": "{tmp}/lacks/*.parquet"}, "some of the files have no column text: leave them out"),
        ({"path": "{tmp}/empty.json"}, "the train split of the data set is empty|cannot load data.path="),
        ({"path": "{tmp}/empty.jsonl"}, "the train split of the data set is empty|cannot load data.path="),
        ({"path": "{tmp}/empty.jsonl", "streaming": True}, "the train split of the data set is empty|cannot load"),
        ({"path": "{tmp}/cut.jsonl.gz"}, "cannot load data.path="),
        ({"path": "{tmp}/cut.jsonl.gz", "streaming": True}, "cannot load data.path="),
        ({"path": "{tmp}/late.parquet"}, "column text holds int 1: choose a column of text"),
        ({"path": "{tmp}/blank.parquet", "streaming": True}, "^the train split has no text in column text"),
        (
            {"path": "{tmp}/two.parquet", "streaming": True},
            "^corpus two is too small: its validation split",
        ),
        ({"path": "{tmp}/uneven"}, "no column text of text in the test split of the data set: .* is one of body"),
        ({"path": "{tmp}/two.parquet"}, "has 2 rows with text, too few to hold out validation and test"),
        ({"path": "", "name": "someone/something"}, "--config.data.corpus=stdlib"),
        ({"path": "", "name": "someone/something", "streaming": True}, "the hub cannot be reached"),
    ],
)
def test_bad_input_ends_in_one_line_at_once(tmp_path, keys, expected, capfd):
    write_parquet(tmp_path / "all.parquet", ROWS)
    write_parquet(tmp_path / "two.parquet", ROWS[:2])
    (tmp_path / "notes.md").write_text("notes")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "page.xml").write_text("<p>")
    (tmp_path / "packed.parquet.gz").write_bytes(gzip.compress((tmp_path / "two.parquet").read_bytes()))
    packed = gzip.compress("".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    for name in ("empty.json", "empty.jsonl"):
        (tmp_path / name).touch()
    for name in ("empty", "uneven", "notes", "readme", "card", "kinds", "lacks"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    (tmp_path / "readme" / "README.md").write_text("about")
    (tmp_path / "card" / "README.md").write_text("---\nconfigs:\n- config_name: x\n---\nabout")
    (tmp_path / "lacks" / "a.jsonl").write_text('{"text": "x"}\n' * 40)
    (tmp_path / "lacks" / "b.jsonl").write_text('{"content": "x"}\n' * 20)
    pq.write_table(pa.table({"text": ROWS}), tmp_path / "lacks" / "a.parquet")
    pq.write_table(pa.table({"content": ROWS}), tmp_path / "lacks" / "b.parquet")
    (tmp_path / "kinds" / "a.csv").write_text("text\na\n")
    write_parquet(tmp_path / "kinds" / "b.parquet", ROWS)
    pq.write_table(pa.table({"text": [{"a": "b"}] * 60}), tmp_path / "nested.parquet")
    pq.write_table(pa.table({"text": [b"a"] * 60}), tmp_path / "bytes.parquet")
    pq.write_table(pa.table({"text": pa.array([None, 1, *range(60)], pa.int64())}), tmp_path / "late.parquet")
    write_parquet(tmp_path / "blank.parquet", ["", None, " "])
    for split in ("train", "test"):
        column = {"train": "text", "test": "body"}[split]
        (tmp_path / "uneven" / f"{split}.jsonl").write_text(json.dumps({column: "x"}) + "\n")
    keys = {"path": str(tmp_path / "all.parquet")} | keys
    config = data_config(cache=tmp_path / "cache", **keys | {"path": keys["path"].replace("{tmp}", str(tmp_path))})
    start = time.monotonic()
    with pytest.raises(InputError, match=expected) as error:
        load_tokenized(config)
    assert time.monotonic() - start < 10
    assert "\n" not in str(error.value)
    # Apart from the message, only our progress line is printed, and it is wiped away.
    others = [part for part in capfd.readouterr().err.split("\r") if part.strip() and "tokenise" not in part]
    assert not others
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("name", ["../../up", "/absolute", "..", "a/../../b", "google/wiki40b"])
@pytest.mark.parametrize("config", ["en", "../en", ""])
def test_two_folders_never_share_the_name_of_a_data_set(name, config):
    actual = hugging_face._name(SimpleNamespace(name=name, config=config, path=None))
    folder = pathlib.Path("cache", f"{actual}-key")
    assert "/" not in actual and folder.resolve().parent == folder.parent.resolve()
