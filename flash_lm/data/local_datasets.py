"""Finds local files for the `datasets` library: those of the data set, their format, and the columns to read."""

import glob
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from flash_lm.config.data import DataConfig
from flash_lm.data.corpus import SPLITS
from flash_lm.data.files import find_files, warn_once
from flash_lm.errors import InputError

# Ending -> the library's name of the kind. Those of text may be compressed, too.
_KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".json.gz": "json",
    ".jsonl.gz": "json",
    ".ndjson.gz": "json",
    ".csv.gz": "csv",
    ".gz": "json",
}
_ABOUT = {
    "README.md",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "config.json",
    "state.json",
}  # no data
# Pandas takes the words None, NA, null and others for an empty cell, and they may be a label or a text.
_OPTIONS = {"csv": {"keep_default_na": False, "na_values": [""]}}
_TEXT = {".txt", ".md", ".text", ".txt.gz"}


def absolute(path: str) -> pathlib.Path:
    """`data.path` from the root."""
    return pathlib.Path(os.path.abspath(os.path.expanduser(path)))


def local_builder(config: DataConfig, columns: Sequence[str]) -> Any:
    """The library's builder for the files of `data.path`, which reads these columns alone: files may differ in others.

    A folder whose README.md says which files it has is read as that says, with all columns.

    Raises:
        InputError: no such file, or none that can be read.
    """
    from datasets import load_dataset_builder  # noqa: PLC0415 (slow to import, and only this corpus needs it)

    path = absolute(config.path)
    # A README.md with metadata decides on files and columns.
    if _has_card(path):
        if glob.has_magic(str(path)):
            raise InputError(f"data.path={config.path} has a README.md with metadata: rename it without * ? [ ]")
        builder = load_dataset_builder(str(path), config.config)
        theirs = _OPTIONS.get(builder.name)
        return load_dataset_builder(str(path), config.config, **theirs) if theirs else builder
    # Otherwise take the files of the one known format, without those about the data set, and sort them by split.
    files = [file for file in find_files(str(path)) if pathlib.Path(file.path).name not in _ABOUT or path.is_file()]
    kind = _kind(config, path, [file.path for file in files])
    files = [file for file in files if _KINDS.get(_ending(file.path)) == kind]
    by_split = {split: [glob.escape(f.path) for f in files if f.split == split] for split in SPLITS}
    # Of parquet, columns that are not needed are not even read.
    options: dict[str, Any] = _OPTIONS.get(kind, {})
    if kind == "parquet" and all(set(columns) <= set(pq.read_schema(file.path).names) for file in files):
        options = {"columns": list(columns)}
    # The library keeps what it has read in a folder of this name.
    name = "columns-" + hashlib.sha256(repr(columns).encode()).hexdigest()[:16]
    builder = load_dataset_builder(
        kind, name, data_files={s: paths for s, paths in by_split.items() if paths}, **options
    )
    _read_only(builder, columns, of_text=[column for column in columns if column != config.label_column])
    return builder


class FirstRow(NamedTuple):
    """The first row of a split, with all its columns, and their types; the values are None if the split is empty."""

    values: dict[str, Any] | None
    features: dict[str, Any]


def first_row(builder: Any, split: str) -> FirstRow:
    """The first row of a split of local files."""
    from datasets import load_dataset_builder  # noqa: PLC0415

    file = glob.escape(builder.config.data_files[split][0])
    unfiltered = load_dataset_builder(builder.name, data_files=[file], **_OPTIONS.get(builder.name, {}))
    rows: Any = unfiltered.as_streaming_dataset()["train"]
    row = next(iter(rows), None)
    return FirstRow(row, rows.features or rows._resolve_features().features)


def _has_card(path: pathlib.Path) -> bool:
    """Whether a folder's README.md begins with metadata of its files or columns, as some of the hub do."""
    try:
        lines = (path / "README.md").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False
    metadata = itertools.takewhile(lambda line: line.strip() != "---", lines[1:]) if lines[:1] == ["---"] else ()
    return any(line.startswith(("configs:", "dataset_info:")) for line in metadata)


def _kind(config: DataConfig, path: pathlib.Path, files: Sequence[str]) -> str:
    # One known format decides, whatever else lies in a folder; a file or a glob must match it alone.
    endings = {_ending(file) for file in files}
    known = endings & _KINDS.keys()
    kinds = {_KINDS[ending] for ending in known}
    if len(kinds) == 1 and (path.is_dir() or endings == known):
        if others := [file for file in files if _ending(file) not in _KINDS]:
            warn_once(f"files of other kinds are left out: {len(others)}, such as {others[0]}")
        return kinds.pop()
    # Otherwise say which files were matched, and what to do.
    if not files:
        raise InputError(f"no file matches data.path={config.path}: give an existing folder, file or glob")
    if len(kinds) > 1:
        raise InputError(
            f"data.path={config.path} has files of different kinds, {_list_endings(known)}: name those of one kind, "
            f"such as '{config.path}/*{min(known)}'"
        )
    if endings <= _TEXT:
        raise InputError(f"data.path={config.path} has text files, each a document: use --config.data.corpus=text")
    what = _list_endings(endings - {""}) or "of an unknown kind"
    raise InputError(f"data.path={config.path} is {what}: give one of {_list_endings(_KINDS)}")


def _ending(path: str) -> str:
    """The file's ending, with that before .gz if it is a usual one."""
    *_, first, last = ("", "", *pathlib.Path(path).suffixes)
    return first + last if last == ".gz" and first in {*_KINDS, *_TEXT} else last


def _list_endings(endings: Iterable[str]) -> str:
    return ", ".join(endings if isinstance(endings, dict) else sorted(endings))


def _read_only(builder: Any, columns: Sequence[str], of_text: Sequence[str]) -> None:
    """Takes the other columns out of each table before the library makes all tables alike.

    Otherwise it hands on only the positions of nested values in other columns.
    """
    make_alike = builder._cast_table

    def select_columns(table: pa.Table) -> pa.Table:
        # Files may differ in the columns that are not used.
        if missing := [column for column in columns if column not in table.column_names]:
            raise InputError(
                f"some of the files have no column {missing[0]}: leave them out, or name a column that all have"
            )
        table = table.select(list(columns))
        for i, column in enumerate(columns):
            if column in of_text and pa.types.is_null(table[column].type):  # until a text comes in another file
                table = table.set_column(i, column, table[column].cast(pa.string()))
        return table

    builder._cast_table = lambda table, *_, **__: make_alike(select_columns(table))
