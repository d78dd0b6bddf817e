"""A path alone chooses the corpus: by the endings of its files."""

import pytest

from flash_lm.cli.load import load_config
from flash_lm.data.corpus_of_path import corpus_of_path
from flash_lm.errors import InputError


def write(folder, *names: str) -> str:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    return str(folder)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.txt", "deep/b.txt"], "text"),
        (["a.txt.gz", "README.md"], "text"),
        (["train.parquet", "README.md"], "hf"),
        (["rows.jsonl"], "hf"),
        (["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"], "images"),
    ],
)
def test_the_endings_of_files_say_which_corpus(names, kind, tmp_path):
    config = load_config("quickstart", [f"--config.data.path={write(tmp_path, *names)}"])
    assert config.data.corpus == kind and (config.data.pack == "examples") == (kind == "images")


def test_a_file_of_any_name_is_a_text(tmp_path):
    write(tmp_path, "enwik8")
    assert corpus_of_path(str(tmp_path / "enwik8")) == "text"


def test_a_corpus_that_reads_paths_stays(tmp_path):
    write(tmp_path, "rows.jsonl")
    words = [f"--config.data.path={tmp_path}", "--config.data.corpus=text"]
    assert load_config("quickstart", words).data.corpus == "text"
    assert load_config("couplets", [f"--config.data.path={tmp_path}"]).data.corpus == "couplets"


def test_a_name_alone_is_a_data_set_of_the_hub():
    assert load_config("quickstart", ["--config.data.name=wikitext"]).data.corpus == "hf"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a.txt", "b.jsonl"], "several kinds, 1 of data.corpus=text and 1 of data.corpus=hf: choose one"),
        (["a.doc", "b.doc"], "no file ends in .txt"),
        ([], "there is nothing: give a file"),
    ],
)
def test_files_of_no_kind_or_of_several(names, problem, tmp_path):
    with pytest.raises(InputError, match=problem):
        corpus_of_path(write(tmp_path / "files", *names))
