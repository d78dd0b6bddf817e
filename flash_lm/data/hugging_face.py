"""Corpora of Hugging Face datasets: from the hub, or local parquet, arrow and json files. A row is a document."""

import functools
import glob
import hashlib
import itertools
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.compute

from flash_lm.config.data import DataConfig
from flash_lm.data import hub
from flash_lm.data.corpus import SPLITS, UNSPLIT, Piece, cut
from flash_lm.data.local_datasets import FirstRow, absolute, first_row, local_builder
from flash_lm.errors import InputError

_compute: Any = pyarrow.compute  # its functions are made at run time, without types
Dataset = Any  # a datasets.Dataset, or a datasets.IterableDataset, which has no length

_HELD_OUT, _MOST_HELD_OUT = 0.05, 5000  # share, and largest number, of the documents in a held-out split
_LOOKED_AT = 10_000  # rows at a time
_STREAM_SHARE, _STREAM_HELD_OUT = 100, 500  # for a stream: one document in this many, and the largest number
_LABEL_TYPES = {
    "bool",
    "string",
    "large_string",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}


class DatasetCorpus:
    """A data set on disk, of which a column is text; rows with only white space are left out."""

    stream = None

    def __init__(self, config: DataConfig, identity: Sequence[Any], splits: dict[str, Dataset]):
        """Reads the training split if another is to be held out of it.

        Args:
            config: names the data set and the column.
            identity: what identifies content and columns.
            splits: train, and validation and test if they exist.
        """
        self._documents: np.ndarray | None = None
        if any(split not in splits for split in SPLITS):
            self._documents = _has_text(config, splits["train"])
            if len(self._documents) < len(splits["train"]):
                # All rows were counted once: another hold-out is another corpus.
                identity = [*identity, "held out of the rows that have text"]
        self.name, self.fingerprint, self._config = _name(config), _fingerprint(identity), config
        self._available = splits
        self._sizes: dict[str, int] = {}
        self._kept: dict[str, list[Any]] = {}

    def size(self, split: str) -> int | None:
        """Bytes of a split."""
        if split not in self._sizes:
            self._sizes[split] = sum(len(piece.text.encode()) for piece in self.pieces(split))
        return self._sizes[split]

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document.

        Raises:
            InputError: too few rows to hold out the missing splits.
        """
        for texts in _rows(self._config, self._rows_of(split)):
            for text in texts:
                yield from cut(text)

    def labels(self, split: str) -> list[str]:
        """The name of each document's label, or of each pair's.

        Raises:
            InputError: a document has none.
        """
        # Every document of the split must have a label.
        rows, kept = self._rows_of(split), self._values(split)
        if missing := sum(_is_missing(rows, self._config.label_column, value) for value in kept):
            raise InputError(
                f"{missing} documents of the {split} split have no label in column {self._config.label_column}: leave "
                "them out, or choose another --config.data.split"
            )
        name = _names_of(rows, self._config.label_column)
        return [name(value) for value in kept]

    def label_names(self) -> tuple[str, ...]:
        """The names of all labels of the training split, in the order of their values.

        Raises:
            InputError: the data set names a label that no text has, or has one label only.
        """
        # The names of the training split define the outputs, in the order of their values.
        rows, column = self._rows_of("train"), self._config.label_column
        name, values = _names_of(rows, column), set(self._values("train"))
        names = tuple(name(x) for x in sorted(x for x in values if not _is_missing(rows, column, x)))
        if empty := [x for x in getattr(rows.features[column], "names", ()) if x not in names]:
            raise InputError(
                f"no text of the training split has the label {', '.join(empty)}, which column {column} names: add "
                "some, or write the labels to another column as text"
            )
        if len(names) == 1:
            raise InputError(
                f"all texts of the training split have the same label in column {column}, {names[0]}: give it two "
                "or more"
            )
        return names

    def _rows_of(self, split: str) -> Dataset:
        return self._available["train"] if split == UNSPLIT else self._splits[split]

    def _values(self, split: str) -> list[Any]:
        """The label's value of each row that has text; read once, since it goes through all texts."""
        if split not in self._kept:
            rows = self._rows_of(split)
            values = zip(_rows(self._config, rows), rows[self._config.label_column], strict=True)
            self._kept[split] = [value for texts, value in values if texts]
        return self._kept[split]

    @functools.cached_property
    def _splits(self) -> dict[str, Dataset]:
        """The splits, with the missing ones held out."""
        missing = [name for name in SPLITS if name not in self._available]
        return self._available if self._documents is None else _hold_out(self._available, missing, self._documents)


class StreamedCorpus:
    """A streamed data set, of which a column is text; only validation and test are tokenised to disk."""

    def __init__(self, config: DataConfig, identity: Sequence[Any], splits: dict[str, Dataset]):
        """Holds missing splits out of the training split by each document's hash: the same on any number of hosts."""
        self.name, self.fingerprint, self._config, self._splits = _name(config), _fingerprint(identity), config, splits
        self._missing = [name for name in SPLITS if name not in splits]
        self.stream = DatasetStream(config, splits["train"], held_out=len(self._missing))

    def size(self, split: str) -> int | None:
        """None: the size is not known without reading the stream."""
        del split

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document."""
        if split == "train":
            texts = self.stream.documents(epoch=0)
        elif split == UNSPLIT:
            texts = _texts(self._config, self._splits["train"])
        elif split in self._missing:
            # Held-out documents are chosen by their hash, up to a fixed number.
            every = _texts(self._config, self._splits["train"])
            mine = (text for text in every if _bucket(text) == self._missing.index(split))
            texts = itertools.islice(mine, _STREAM_HELD_OUT)
        else:
            texts = _texts(self._config, self._splits[split])
        for text in texts:
            yield from cut(text)


class DatasetStream:
    """The training documents of a streamed data set, in order."""

    def __init__(self, config: DataConfig, rows: Dataset, held_out: int):
        """Does not read anything yet; documents whose bucket is below `held_out` are left out."""
        self._config, self._rows, self._held_out = config, rows, held_out

    def share(self, host: int, hosts: int) -> "DatasetStream":
        """The documents of one host (host sharding): by file if the files divide evenly, else every hosts-th row."""
        from datasets.distributed import split_dataset_by_node  # noqa: PLC0415 (slow to import)

        return DatasetStream(self._config, split_dataset_by_node(self._rows, host, hosts), self._held_out)

    def documents(self, epoch: int) -> Iterator[str]:
        """All documents once; in the epoch of a restored position, only those after it."""
        self._rows.set_epoch(epoch)
        return (text for text in _texts(self._config, self._rows) if _bucket(text) >= self._held_out)

    def state(self) -> dict[str, Any]:
        """The position after the last document, as JSON."""
        return self._rows.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` returned."""
        self._rows.load_state_dict(state)


def hugging_face(config: DataConfig) -> DatasetCorpus | StreamedCorpus:
    """Loads the data set `data.name` with `data.config`, or the local files of `data.path`.

    Validation and test are the data set's splits of these names; a missing one is held out of the training split,
    document by document.

    Raises:
        InputError: no such data set, file, config, split or column; no network; or files that cannot be read.
    """
    if config.name and not hub.is_offline() and not hub.is_reachable():
        # Set before the import, which reads it: otherwise half a minute of retries comes before the error.
        os.environ["HF_HUB_OFFLINE"] = "1"
    with hub.explain_errors(config):
        columns = [*_columns(config), *([config.label_column] if config.label_column else [])]
        builder = _hub_builder(config) if config.name else local_builder(config, columns)
        if config.path:  # before all of it is read
            for split, theirs in _match_splits(config, builder.config.data_files).items():
                _check_columns(config, split, first_row(builder, theirs))
        # A stream is read later, in training; otherwise the library converts all files now, or has them in its cache.
        if config.streaming:
            datasets = dict(builder.as_streaming_dataset())
        else:
            builder.download_and_prepare()
            datasets = dict(builder.as_dataset())
        splits = {split: datasets[theirs] for split, theirs in _match_splits(config, datasets).items()}
        # The columns of the hub are only known now; a column without any text is an error in the config.
        for split, rows in splits.items():
            if config.name:
                _check_columns(config, split, FirstRow(next(iter(rows), None), rows.features))
            for column in _columns(config):
                if not any(text.strip() for text in _texts(config, rows, column)):
                    raise InputError(f"the {split} split has no text in column {column}: choose another")
        splits = {split: rows.select_columns(columns) for split, rows in splits.items()}
    identity = [_content(config, builder), config.split, *_columns(config), config.streaming]
    return (StreamedCorpus if config.streaming else DatasetCorpus)(config, identity, splits)


def _fingerprint(identity: Sequence[Any]) -> str:
    return hashlib.sha256(repr(list(identity)).encode()).hexdigest()


def _match_splits(config: DataConfig, names: Iterable[Any]) -> dict[str, str]:
    """The data set's name of each of our splits that it has.

    Raises:
        InputError: it has no data.split.
    """
    names = [str(name) for name in names]
    if config.split not in names:
        raise InputError(f"no split {config.split} in the data set: --config.data.split is one of {', '.join(names)}")
    return {"train": config.split} | {name: name for name in SPLITS[1:] if name in names and name != config.split}


def _columns(config: DataConfig) -> list[str]:
    """The columns of text: one, or two of a pair."""
    return [config.text_column, *([config.pair_column] if config.pair_column else [])]


def _rows(config: DataConfig, rows: Dataset) -> Iterator[tuple[str, ...]]:
    """The texts of each row: one, or a pair; none if one of them is all white space."""
    columns = [_texts(config, rows, column) for column in _columns(config)]
    for texts in zip(*columns, strict=True):
        yield texts if all(text.strip() for text in texts) else ()


def _texts(config: DataConfig, rows: Dataset, column: str | None = None) -> Iterator[str]:
    """The texts of a column, or of that of the text; an empty one for a row that has none.

    Raises:
        InputError: a row cannot be read, or holds something other than text.
    """
    with hub.explain_errors(config):
        for row in rows:
            text = row[column or config.text_column]
            if not isinstance(text, str | None):
                raise InputError(
                    f"column {column or config.text_column} holds {type(text).__name__} {text!r}: choose a column of "
                    "text"
                )
            yield text or ""


def _has_text(config: DataConfig, rows: Dataset) -> np.ndarray:
    """Numbers of the rows whose texts are not all white space.

    A run looks them up whenever it starts. So only rows without a visible ASCII character go through Python.
    """
    # Most texts have a visible ASCII character, which Arrow finds quickly; only the rest is read.
    unsure = np.zeros(len(rows), bool)
    with hub.explain_errors(config):
        tables = rows.select_columns(_columns(config)).with_format("arrow").iter(_LOOKED_AT)
        for number, table in enumerate(tables):
            for column in table.columns:
                seen = _compute.fill_null(_compute.match_substring_regex(column, "[!-~]"), False)
                unsure[number * _LOOKED_AT :][: len(seen)] |= ~np.asarray(seen)
    unsure_rows = np.flatnonzero(unsure)
    blank = [not texts for texts in _rows(config, rows.select(unsure_rows))]
    return np.delete(np.arange(len(rows)), unsure_rows[blank])


def _bucket(text: str) -> int:
    return zlib.crc32(text.encode(errors="replace")) % _STREAM_SHARE


def _name(config: DataConfig) -> str:
    """The corpus's name in messages and folders."""
    if config.name:
        return "-".join(part for part in (config.name, config.config) if part).replace("/", "--")
    path = absolute(config.path)
    if path.exists():
        return path.stem
    return path.parent.name if glob.has_magic(path.name) else path.stem


def _hub_builder(config: DataConfig) -> Any:
    from datasets import load_dataset_builder  # noqa: PLC0415 (slow to import, and only this corpus needs it)

    return load_dataset_builder(config.name, config.config)


def _content(config: DataConfig, builder: Any) -> Any:
    """The identity of the content: hashes of local files; for the hub, data set, config, version and commit."""
    if config.name:
        return pathlib.Path(builder.cache_dir).parts[-4:]
    return {str(split): [_file_hash(path) for path in paths] for split, paths in builder.config.data_files.items()}


def _file_hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hold_out(splits: dict[str, Dataset], missing: list[str], documents: np.ndarray) -> dict[str, Dataset]:
    """Documents held out of the training split for each missing one, spread evenly over its rows that have text."""
    # Held-out documents are dealt in turn, so that each split covers all of the data set.
    rows = splits["train"]
    each = min(max(1, round(_HELD_OUT * len(documents))), _MOST_HELD_OUT)
    if len(documents) <= len(missing) * each:
        raise InputError(
            f"the data set has {len(documents)} rows with text, too few to hold out {' and '.join(missing)}"
        )
    held_rows = documents[np.linspace(0, len(documents) - 1, each * len(missing)).astype(np.int64)]
    held = {name: rows.select(held_rows[i :: len(missing)]) for i, name in enumerate(missing)}
    return splits | held | {"train": rows.select(np.delete(np.arange(len(rows)), held_rows))}


def _check_columns(config: DataConfig, split: str, first: FirstRow) -> None:
    """Checks that the columns of text hold text, and that of labels labels.

    Raises:
        InputError: one does not, or the split has no row.
    """
    # A split without rows has no columns to check.
    row, features = first
    if row is None:
        raise InputError(f"the {split} split of the data set is empty: choose another --config.data.split")
    for key in ("text_column", "pair_column"):
        column = getattr(config, key)
        if column and (column not in row or not isinstance(row[column], str | None)):
            names = ", ".join(name for name, value in row.items() if isinstance(value, str))
            advice = f"--config.data.{key} is one of {names}" if names else "none of its columns holds text"
            what = (
                f"column {column} holds {type(row[column]).__name__}, not text,"
                if column in row
                else f"no column {column} of text"
            )
            raise InputError(f"{what} in the {split} split of the data set: {advice}")
    # Labels are integers, text or truth values.
    if config.label_column:
        kinds = [name for name, feature in features.items() if getattr(feature, "dtype", "") in _LABEL_TYPES]
        if config.label_column not in kinds:
            labels = features.get(config.label_column)
            # In CSV one empty cell turns whole numbers into fractions.
            holes = ", without empty cells" if str(getattr(labels, "dtype", "")).startswith("float") else ""
            raise InputError(
                f"no column {config.label_column} of labels (integers, text or booleans{holes}) in the "
                f"{split} split of the data set: --config.data.label_column is one of {', '.join(kinds)}"
            )


def _is_missing(rows: Dataset, column: str, value: Any) -> bool:
    """Whether a row has no label; where numbers have names, −1 means that."""
    return value is None or (value == -1 and hasattr(rows.features[column], "int2str"))


def _names_of(rows: Dataset, column: str) -> Callable[[Any], str]:
    """The name of a label's value: a data set may give numbers names."""
    return getattr(rows.features[column], "int2str", str)
