"""Corpora of Hugging Face datasets: of the hub by name, or local parquet, arrow and json files. A row is a document."""

import contextlib
import glob
import hashlib
import os
import pathlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np

from flash_lm.config import DataConfig
from flash_lm.data.corpus import SPLITS, Piece, cut
from flash_lm.data.text_files import file_hash
from flash_lm.errors import InputError

Rows = Any  # a datasets.Dataset, or a datasets.IterableDataset, which has no length

_ROWS = 64  # read at a time; a row may be a book
_HELD_OUT, _MOST_HELD_OUT = 0.05, 5000  # share and number of the documents in a split that has to be held out
_STREAMED_HELD_OUT = 500  # documents at the beginning of a stream, for each such split
_HUB_TIMEOUT = 5  # seconds
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".gz": "json"}


class DatasetCorpus:
    """A column of text; rows of white space alone are left out."""

    def __init__(self, name: str, fingerprint: str, splits: dict[str, Rows], column: str):
        """Reads nothing yet.

        Args:
            name: of the corpus.
            fingerprint: of its content.
            splits: train, validation and test.
            column: that holds the text.
        """
        self.name, self.fingerprint = name, fingerprint
        self._splits = {split: rows.select_columns([column]) for split, rows in splits.items()}
        self._column = column
        self.stream = None if _sized(splits["train"]) else DatasetStream(splits["train"], column)

    def size(self, split: str) -> int | None:
        """Bytes of a split; None for a stream."""
        if not _sized(self._splits[split]):
            return None
        return sum(len(piece.text.encode()) for piece in self.pieces(split))

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document."""
        for batch in self._splits[split].iter(_ROWS):
            for text in batch[self._column]:
                yield from cut(text or "")


class DatasetStream:
    """The rows of a streamed data set, one after the other."""

    def __init__(self, rows: Rows, column: str):
        """Reads nothing yet."""
        self._rows, self._column = rows.select_columns([column]), column

    def share(self, host: int, hosts: int) -> "DatasetStream":
        """The documents of one host: whole files where they divide evenly, else every hosts-th row."""
        from datasets.distributed import split_dataset_by_node  # noqa: PLC0415

        return DatasetStream(split_dataset_by_node(self._rows, host, hosts), self._column)

    def documents(self, epoch: int) -> Iterator[str]:
        """All documents once; in the epoch of a place that was restored, from there on."""
        self._rows.set_epoch(epoch)
        for row in self._rows:
            yield row[self._column] or ""

    def state(self) -> dict[str, Any]:
        """The place after the last document, as JSON."""
        return self._rows.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a place that `state` gave."""
        self._rows.load_state_dict(state)


def hugging_face(config: DataConfig) -> DatasetCorpus:
    """The data set of `data.name` and `data.config`, or of the local files of `data.path`.

    Validation and test are the data set's own splits of these names; one that it lacks is held out of the training
    split, document by document.

    Raises:
        InputError: no such data set, file, config, split or column; no network; or files that cannot be read.
    """
    if config.name and not _offline() and not _hub_is_reachable():
        # Before the import, which reads it: else half a minute of retries come before the error.
        os.environ["HF_HUB_OFFLINE"] = "1"
    with _explained(config):
        builder = _builder(config)
        if config.streaming:
            found = builder.as_streaming_dataset()
        else:
            builder.download_and_prepare()
            found = builder.as_dataset()
        splits = _splits(config, dict(found))
        _check_column(config, splits["train"])
    identity = [_content(config, builder), config.split, config.text_column, config.streaming]
    fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()
    return DatasetCorpus(_name(config), fingerprint, splits, config.text_column)


def _name(config: DataConfig) -> str:
    """For messages and folders."""
    if config.name:
        return "-".join(part for part in (config.name.replace("/", "--"), config.config) if part)
    path = pathlib.Path(config.path)
    return path.parent.name if glob.has_magic(path.name) else path.stem


def _sized(rows: Rows) -> bool:
    return hasattr(rows, "__len__")


def _builder(config: DataConfig) -> Any:
    from datasets import load_dataset_builder  # noqa: PLC0415 (slow to import, and only this corpus needs it)

    if config.name:
        return load_dataset_builder(config.name, config.config)
    path = os.path.expanduser(config.path)
    if os.path.isdir(path):
        return load_dataset_builder(path)
    files = sorted(glob.glob(path, recursive=True))
    if not files:
        raise InputError(f"no file matches data.path={config.path}: give an existing folder, file or glob")
    suffix = pathlib.Path(files[0]).suffix
    if suffix not in _BUILDERS:
        raise InputError(
            f"data.path={config.path} is {suffix or 'of no known kind'}: give one of {', '.join(_BUILDERS)}"
        )
    return load_dataset_builder(_BUILDERS[suffix], data_files=files)


def _content(config: DataConfig, builder: Any) -> Any:
    """What stands for the content: hashes of local files; of the hub its data set, config, version and commit."""
    if config.name:
        return pathlib.Path(builder.cache_dir).parts[-4:]
    return {str(split): [file_hash(path) for path in paths] for split, paths in builder.config.data_files.items()}


def _splits(config: DataConfig, found: dict[str, Rows]) -> dict[str, Rows]:
    if config.split not in found:
        raise InputError(f"no split {config.split} in the data set: --config.data.split is one of {', '.join(found)}")
    splits = {"train": found[config.split]}
    splits |= {name: found[name] for name in SPLITS[1:] if name in found and name != config.split}
    missing = [name for name in SPLITS if name not in splits]
    return _hold_out(splits, missing) if missing else splits


def _hold_out(splits: dict[str, Rows], missing: list[str]) -> dict[str, Rows]:
    """Documents of the training split for each missing one: spread evenly, or the first ones of a stream."""
    rows = splits["train"]
    if not _sized(rows):
        held = {name: rows.skip(i * _STREAMED_HELD_OUT).take(_STREAMED_HELD_OUT) for i, name in enumerate(missing)}
        return splits | held | {"train": rows.skip(len(missing) * _STREAMED_HELD_OUT)}
    each = min(max(1, round(_HELD_OUT * len(rows))), _MOST_HELD_OUT)
    if len(rows) <= len(missing) * each:
        raise InputError(f"the data set has {len(rows)} rows, too few to hold out {' and '.join(missing)}")
    places = np.linspace(0, len(rows) - 1, each * len(missing)).astype(np.int64)
    held = {name: rows.select(places[i :: len(missing)]) for i, name in enumerate(missing)}
    return splits | held | {"train": rows.select(np.delete(np.arange(len(rows)), places))}


def _check_column(config: DataConfig, rows: Rows) -> None:
    first = next(iter(rows), None)
    if first is None:
        raise InputError(f"split {config.split} of the data set is empty: choose another --config.data.split")
    texts = [name for name, value in first.items() if isinstance(value, str)]
    if not isinstance(first.get(config.text_column, 0), str | None):
        raise InputError(
            f"no column {config.text_column} of text in the data set: --config.data.text_column is one of "
            f"{', '.join(texts)}"
        )


@contextlib.contextmanager
def _explained(config: DataConfig) -> Iterator[None]:
    """Turns what the library raises into one line that says what to change."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError  # noqa: PLC0415

    source = f"data.name={config.name}" if config.name else f"data.path={config.path}"
    try:
        yield
    except DatasetNotFoundError:
        raise InputError(f"{source}: no such data set on the hub, or no access to it: check the name") from None
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        if config.name and _offline() and isinstance(error, OSError):
            raise InputError(
                f"{source} is not on this machine and the hub cannot be reached: connect, set --config.data.path to "
                f"local files, or take the text that every machine has with --config.data.corpus=stdlib"
            ) from None
        cause = error.__cause__ or error
        raise InputError(f"cannot load {source}: {' '.join(str(cause).split())[:300]}") from None


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE") == "1"


def _hub_is_reachable() -> bool:
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        return True  # it answers
    except OSError:
        return False
    return True
