"""Couplets from parquet and from two files: rows, splits, and errors of bad files."""

import pathlib

import pyarrow
import pyarrow.parquet
import pytest

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.corpus import SPLITS
from flash_lm.data.splits import ROWS, load_splits
from flash_lm.errors import InputError

PAIRS = {
    "train": [("春風", "秋雨"), ("山高月", "水落石"), ("春日", "秋夜")],
    "validation": [("春", "水")],
    "test": [("日月", "星x")],
}


def write_parquet(folder: pathlib.Path, names=("first", "second"), pairs=None) -> pathlib.Path:
    for split, lines in (pairs or PAIRS).items():
        columns = dict(zip(names, map(list, zip(*lines, strict=True)), strict=True))
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{split}.parquet")
    return folder


def write_files(folder: pathlib.Path, pairs) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in zip(("in.txt", "out.txt"), zip(*pairs, strict=True), strict=True):
        (folder / name).write_text("".join(" ".join(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def load(folder: pathlib.Path):
    config = get_config()
    config.data.update(corpus="couplets", pack="examples", path=str(folder), length=8)
    return load_splits(parse(config).data)


def test_a_row_has_the_first_line_as_input_and_the_second_as_target(tmp_path):
    corpus = load(write_parquet(tmp_path))
    tokenizer = corpus.tokenizer
    row = ROWS["examples"](corpus.splits["train"], 8, tokenizer.begin)[1]
    inputs, targets = row["inputs_BxL"], row["targets_BxL"]
    assert inputs[0] == inputs[4] == tokenizer.begin
    assert tokenizer.decode(inputs[1:4]) == "山高月" and tokenizer.decode(targets[4:7]) == "水落石"
    assert row["loss_mask_BxL"].tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert tokenizer.decode([tokenizer.unknown + 1]) in {"春", "秋"}  # twice in the training split, all others once
    assert tokenizer.encode(["x"])[0].tolist() == [tokenizer.unknown]


def test_two_files_are_the_same_couplets(tmp_path):
    parquet, files = tmp_path / "parquet", tmp_path / "files"
    parquet.mkdir()
    for split, pairs in PAIRS.items():
        write_files(files / split, pairs)
    one, other = load(write_parquet(parquet)), load(files)
    assert one.fingerprint == other.fingerprint and one.tokenizer.fingerprint == other.tokenizer.fingerprint
    for split, pairs in {**PAIRS, "validation": [*PAIRS["validation"], ("月", "日")]}.items():
        write_files(files / split, pairs)
    assert load(files).fingerprint != one.fingerprint


def test_missing_splits_are_held_out_by_their_first_lines(tmp_path):
    pairs = [(f"{i % 300:03}", f"{i:03}"[-3:]) for i in range(600)]
    corpus = load(write_files(tmp_path, pairs))
    rows = {name: ROWS["examples"](corpus.splits[name], 8, 1) for name in SPLITS}
    firsts = {
        name: [corpus.tokenizer.decode(rows[name][i]["inputs_BxL"][1:4]) for i in range(len(rows[name]))]
        for name in SPLITS
    }
    assert sum(map(len, firsts.values())) == 600 and all(firsts.values())
    assert not set(firsts["train"]) & (set(firsts["validation"]) | set(firsts["test"]))
    assert not set(firsts["validation"]) & set(firsts["test"])
    assert len(firsts["train"]) > 540


def _damaged(path: pathlib.Path) -> pathlib.Path:
    path.write_bytes(b"\xff" + path.read_bytes()[1:-9])
    return path.parent


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda folder: folder, "has no couplets: give a folder with train.parquet"),
        (lambda folder: write_parquet(folder, ("first", "b")), "has no column second"),
        (lambda folder: write_parquet(folder, pairs={"train": [("ab", None)]}), "pair 1 has 2 and 0 characters"),
        (lambda folder: write_parquet(folder, pairs={"train": [(1, 2)]}), "has int in its columns first and second"),
        (lambda folder: _damaged(write_parquet(folder) / "test.parquet"), "cannot read .*test.parquet"),
        (lambda folder: _damaged(write_files(folder, PAIRS["train"]) / "in.txt"), "in.txt is not UTF-8 at byte 0"),
        (lambda folder: write_files(folder, [("ab", "ab"), ("a", "bc")]), "pair 2 has 1 and 2 characters"),
        (lambda folder: write_files(folder, [("ab", "cd")]), "leaves no couplet for"),
        (lambda folder: write_parquet(folder, pairs={"train": [("", "")]}), "pair 1 has 0 and 0 characters"),
    ],
)
def test_bad_files_are_reported(tmp_path, write, expected):
    with pytest.raises(InputError, match=expected):
        load(write(tmp_path))


def test_files_of_different_length(tmp_path):
    write_files(tmp_path, PAIRS["train"])
    (tmp_path / "out.txt").write_text("秋 雨\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"must have as many lines as each other: in.txt 3 and out.txt 1"):
        load(tmp_path)


def test_no_path():
    config = get_config()
    config.data.update(corpus="couplets", pack="examples")
    with pytest.raises(InputError, match="data.corpus=couplets needs data.path"):
        parse(config)
