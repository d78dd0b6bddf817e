"""Corpora of UTF-8 files: the interpreter's standard library, and your own files."""

import codecs
import glob
import hashlib
import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from flash_lm.config import DataConfig
from flash_lm.data.corpus import SPLITS, WHOLE, Piece
from flash_lm.errors import InputError

_HELD_OUT = 0.05  # share of the documents, or of a single file's bytes, in each of validation and test
_BLOCK = 1 << 20  # bytes read at a time


class Span(NamedTuple):
    """One document: bytes of a file from start to end."""

    path: str
    start: int
    end: int


class FileCorpus:
    """UTF-8 text files.

    With three files or more, each is a document, and the splits are disjoint by document (files of equal content count
    as one). One or two files are cut into contiguous blocks, the first 90 % for training.
    """

    def __init__(self, name: str, paths: list[str]):
        """Reads the files once, to hash them.

        Args:
            name: name of the corpus in messages and the cache.
            paths: files; empty ones are left out.

        Raises:
            InputError: a file cannot be read, or there is no text.
        """
        self.name, self.stream = name, None
        try:
            files = [(path, file_hash(path)) for path in sorted(paths) if os.path.getsize(path)]
        except OSError as error:
            raise InputError(f"cannot read {error.filename}: {error.strerror}: check --config.data.path") from None
        if not files:
            raise InputError(f"corpus {name} is empty: give files with text in --config.data.path")
        self.fingerprint = hashlib.sha256("".join(digest for _, digest in files).encode()).hexdigest()
        distinct = sorted({digest for _, digest in files})
        if len(distinct) < len(SPLITS):
            self._spans = _blocks([path for path, _ in files])
        else:
            held_out = max(1, round(_HELD_OUT * len(distinct)))
            place = {digest: i - (len(distinct) - 2 * held_out) for i, digest in enumerate(distinct)}
            self._spans = {split: [] for split in SPLITS}
            for path, digest in files:
                split = SPLITS[0 if place[digest] < 0 else 1 + place[digest] // held_out]
                self._spans[split].append(Span(path, 0, os.path.getsize(path)))
        self._spans[WHOLE] = [Span(path, 0, os.path.getsize(path)) for path, _ in files]

    def size(self, split: str) -> int:
        """Bytes of a split."""
        return sum(span.end - span.start for span in self._spans[split])

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document.

        Raises:
            InputError: a file is not UTF-8.
        """
        for span in self._spans[split]:
            for i, text in enumerate(_read(span)):
                yield Piece(text, begins_document=i == 0)


def text_files(config: DataConfig) -> FileCorpus:
    """The files of `data.path`: a file, a glob, or a folder with .txt files at any depth.

    Raises:
        InputError: no such file, a file that cannot be read, or no text in it.
    """
    path = os.path.expanduser(config.path)
    if os.path.isdir(path):
        path = os.path.join(glob.escape(path), "**", "*.txt")
    paths = [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
    if not paths:
        raise InputError(
            f"no file matches data.path={config.path}: give a text file, a folder with .txt files, or a glob such as "
            f"'books/*.md'"
        )
    return FileCorpus("text", paths)


def stdlib(config: DataConfig) -> FileCorpus:
    """The sources of the running interpreter's standard library, without its tests. Differs by Python version."""
    del config
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)]
    return FileCorpus(
        f"stdlib-{sys.version_info.major}.{sys.version_info.minor}", [str(p) for p in paths if _is_utf8(p)]
    )


def _is_utf8(path: pathlib.Path) -> bool:
    """Whether a source is UTF-8; some of the standard library declare another encoding."""
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def file_hash(path: str) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blocks(paths: list[str]) -> dict[str, list[Span]]:
    """Contiguous blocks of each file, cut at the ends of lines."""
    spans: dict[str, list[Span]] = {split: [] for split in SPLITS}
    for path in paths:
        size = os.path.getsize(path)
        cuts = [
            0,
            _line_start(path, int(size * (1 - 2 * _HELD_OUT))),
            _line_start(path, int(size * (1 - _HELD_OUT))),
            size,
        ]
        for split, start, end in zip(SPLITS, cuts[:-1], cuts[1:], strict=True):
            if start < end:
                spans[split].append(Span(path, start, end))
    return spans


def _line_start(path: str, offset: int) -> int:
    """The first start of a line at or after `offset`; in text without line ends nearby, the start of a character."""
    with open(path, "rb") as file:
        file.seek(offset)
        block = file.read(_BLOCK)
    newline = block.find(b"\n")
    if newline >= 0:
        return offset + newline + 1
    continuation = (byte & 0b1100_0000 == 0b1000_0000 for byte in block)
    return offset + next((i for i, inside in enumerate(continuation) if not inside), 0)


def _read(span: Span) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, rest = span.start, ""
    with open(span.path, "rb") as file:
        file.seek(span.start)
        while position < span.end:
            block = file.read(min(_BLOCK, span.end - position))
            if not block:
                raise InputError(f"{span.path} shrank while it was read: start again when no process writes to it")
            pending = len(decoder.getstate()[0])
            try:
                text = rest + decoder.decode(block, final=position + len(block) == span.end)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{span.path} is not UTF-8 at byte {position - pending + error.start}: convert it, for example "
                    f"with iconv -t utf-8"
                ) from None
            position += len(block)
            cut = text.rfind("\n") + 1 if position < span.end else len(text)
            cut = cut or len(text)
            rest = text[cut:]
            if text[:cut]:
                yield text[:cut]
