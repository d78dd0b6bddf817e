"""Mixtures: the documents of several corpora as one text, whose parts are sampled in fixed shares."""

import bisect
import dataclasses
import glob
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from flash_lm.config.addresses import is_remote
from flash_lm.config.data import DataConfig
from flash_lm.data.corpus import Corpus, DocumentStream, Piece
from flash_lm.data.packing import Row, Rows
from flash_lm.data.tokenized_text import TokenizedText


class MixedCorpus:
    """The text of several corpora, one after another in each split."""

    def __init__(self, parts: Mapping[str, Corpus]):
        """Reads nothing yet; `parts`: corpora by name."""
        self.parts, self.name = parts, "-".join(map(_name, parts))  # the name of a folder, not of sources
        self.stream: DocumentStream | None = None
        # The fingerprint depends on the contents and their order, not on the shares.
        contents = " ".join(corpus.fingerprint for corpus in parts.values())
        self.fingerprint = hashlib.sha256(f"mixture {contents}".encode()).hexdigest()

    def size(self, split: str) -> int | None:
        """Bytes of a split."""
        sizes = [corpus.size(split) for corpus in self.parts.values()]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document."""
        # Each piece is marked with its part, so that parts stay separate after tokenising.
        for number, corpus in enumerate(self.parts.values()):
            for piece in corpus.pieces(split):
                yield piece._replace(part=number)


class MixedRows:
    """The rows of all parts of a mixture, one part after another.

    Attributes:
        ranges: numbers of the rows of each part.
    """

    def __init__(self, parts: Sequence[Rows]):
        """Cuts nothing yet."""
        self._parts, self._ends = parts, list(itertools.accumulate(map(len, parts)))
        self.ranges = [range(end - len(rows), end) for rows, end in zip(parts, self._ends, strict=True)]

    def __len__(self) -> int:
        """The number of rows."""
        return self._ends[-1]

    def __getitem__(self, row: int) -> Row:
        """The row with this number."""
        # The part whose range has this number.
        part = bisect.bisect_right(self._ends, row)
        return self._parts[part][row - self.ranges[part].start]


def configs_of_parts(config: DataConfig) -> dict[str, DataConfig]:
    """The config of each part of `data.mixture` by its name: the last name of its path, or all of it if two agree."""
    # Short names are used only if they are unique.
    sources = [source for source, _ in config.mixture]
    short = [_name(source) for source in sources]
    names = short if len(set(short)) == len(short) else sources
    return {name: _source_config(config, source) for name, source in zip(names, sources, strict=True)}


def split_parts(text: TokenizedText) -> list[TokenizedText]:
    """The tokens and documents of each part of a mixture's text; the words, lines and bytes of a part are not known."""
    parts, ends = [], list(itertools.accumulate(text.part_documents))
    for documents, end in zip(text.part_documents, ends, strict=True):
        starts = text.starts[end - documents : end + 1]
        parts.append(TokenizedText(text.tokens[starts[0] : starts[-1]], starts - starts[0], 0, 0, 0))
    return parts


def _source_config(config: DataConfig, source: str) -> DataConfig:
    """The config of one source: a file, folder or glob, or with data.corpus=hf a data set on the hub."""
    # With data.corpus=hf, a source that is no local path is a data set on the hub.
    path = os.path.expanduser(source)
    is_path = os.path.exists(path) or glob.has_magic(path) or os.path.isabs(path) or is_remote(path)
    local = config.corpus != "hf" or is_path
    keys = {"path": source, "name": None} if local else {"path": None, "name": source}
    return dataclasses.replace(config, mixture=(), **keys)


def _name(source: str) -> str:
    path = pathlib.PurePath(source)
    return (path.parent if glob.has_magic(path.name) else path).stem or source
