"""Corpora of UTF-8 files: the interpreter's standard library, and files of the user."""

import codecs
import gzip
import hashlib
import pathlib
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from flash_lm.config.data import DataConfig
from flash_lm.data.corpus import SPLITS, UNSPLIT, Piece
from flash_lm.data.files import DataFile, find_files
from flash_lm.errors import InputError

_HELD_OUT = 0.05  # share of the documents, or of a single file's bytes, in each of validation and test
_BLOCK = 1 << 20  # bytes read at a time
_GZIP = b"\x1f\x8b"  # begins its files
_ENDINGS = (".txt", ".txt.gz")  # of the files of a folder


class Span(NamedTuple):
    """The bytes of a document in a file, from start to end."""

    path: str
    start: int
    end: int


class _Content(NamedTuple):
    """The document of a file, the hash of its text, and its split."""

    span: Span
    digest: str
    split: str


class FileCorpus:
    """A corpus of UTF-8 text files, plain or compressed with gzip.

    Validation and test are the files of these splits. A missing one is held out of the training files: with three or
    more by file (files of equal content count as one). With fewer, or where that would leave training less text
    than is held out, each file is cut into contiguous blocks, the first 90 % for training.

    Attributes:
        fingerprint: hash of the content, and of what else decides on the splits.
    """

    def __init__(self, name: str, files: Sequence[DataFile]):
        """Reads the files once, to hash them.

        Args:
            name: name of the corpus in messages and the cache.
            files: the files with their splits; empty ones are left out.

        Raises:
            InputError: a file cannot be read, or none has text.
        """
        self.name, self.stream = name, None
        # Hash every file once.
        contents = [_content(file) for file in files]
        contents = [content for content in contents if content.span.start < content.span.end]
        if not contents:
            raise InputError(f"corpus {name} is empty: give files with text in --config.data.path")
        self._spans = {split: [c.span for c in contents if c.split == split] for split in SPLITS}
        self._none_for_training = not self._spans["train"]
        self._spans[UNSPLIT] = [content.span for content in contents]
        # Hold out the missing splits: by file if that leaves enough to train on, else by blocks of each file.
        missing = [split for split in SPLITS[1:] if not self._spans[split]]
        splits = "" if len(missing) == 2 else f" {[content.split for content in contents]}"
        if missing:
            dealt = _deal_files([content for content in contents if content.split == "train"], missing)
            if dealt and _bytes(dealt["train"]) < sum(_bytes(dealt[split]) for split in missing):
                dealt, splits = None, splits + " blocks"
            self._spans |= dealt or _blocks(self._spans["train"], missing)
        digests = "".join(content.digest for content in contents)
        self.fingerprint = hashlib.sha256((digests + splits).encode()).hexdigest()

    def size(self, split: str) -> int:
        """Bytes of a split."""
        return _bytes(self._spans[split])

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document.

        Raises:
            InputError: a file is not UTF-8, or no file is for training.
        """
        if not self._spans[split] and self._none_for_training:
            raise InputError(
                f"the names of all files of corpus {self.name} say validation or test: give files for training, too"
            )
        for span in self._spans[split]:
            for i, text in enumerate(_read(span)):
                yield Piece(text, begins_document=i == 0)


def text_files(config: DataConfig) -> FileCorpus:
    """The files of `data.path`: a file, a glob, or a folder with .txt files at any depth.

    Raises:
        InputError: no such file, a file that cannot be read, or no text in it.
    """
    files = find_files(config.path, _ENDINGS)
    if not files:
        raise InputError(
            f"no file matches data.path={config.path}: give a text file, a folder with .txt files, or a glob such as "
            f"'books/*.md'"
        )
    return FileCorpus("text", files)


def stdlib(config: DataConfig) -> FileCorpus:
    """The sources of the running interpreter's standard library, without its tests. Differs by Python version."""
    del config
    # The library's modules without tests and installed packages.
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)]
    return FileCorpus(
        f"stdlib-{sys.version_info.major}.{sys.version_info.minor}",
        [DataFile(path) for path in sorted(str(p) for p in paths if _is_utf8(p))],
    )


def _is_utf8(path: pathlib.Path) -> bool:
    """Whether a source is UTF-8; some of the standard library declare another encoding."""
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _content(file: DataFile) -> _Content:
    """Reads a file once; a byte order mark at its start is no text."""
    digest, size = hashlib.sha256(), 0
    try:
        # Hash in blocks, so that a file need not fit into memory.
        with _open(file.path) as opened:
            mark = len(codecs.BOM_UTF8) if opened.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
            opened.seek(mark)
            while block := opened.read(_BLOCK):
                digest.update(block)
                size += len(block)
    except OSError as error:
        reason = error.strerror or "it is not what gzip writes"
        raise InputError(f"cannot read {file.path}: {reason}: check --config.data.path") from None
    except (EOFError, zlib.error):
        raise InputError(f"cannot read {file.path}: it is truncated or damaged: download it again") from None
    return _Content(Span(file.path, mark, mark + size), digest.hexdigest(), file.split)


def _open(path: str) -> BinaryIO:
    """A file's text, whether it is compressed or not, and whatever its name says."""
    file = open(path, "rb")  # noqa: SIM115 (the caller closes it)
    compressed = file.read(len(_GZIP)) == _GZIP
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if compressed else file  # type: ignore[return-value]


def _bytes(spans: list[Span]) -> int:
    return sum(span.end - span.start for span in spans)


def _deal_files(contents: list[_Content], missing: list[str]) -> dict[str, list[Span]] | None:
    """Some files for each missing split, by the order of their hashes; None: too few."""
    distinct = sorted({content.digest for content in contents})
    if len(distinct) <= len(missing):
        return None
    # The last hashes are held out; files of equal content have one hash, so they go to the same split.
    held_out = max(1, round(_HELD_OUT * len(distinct)))
    order = {digest: i - (len(distinct) - len(missing) * held_out) for i, digest in enumerate(distinct)}
    spans: dict[str, list[Span]] = {split: [] for split in ("train", *missing)}
    for span, digest, _ in contents:
        spans["train" if order[digest] < 0 else missing[order[digest] // held_out]].append(span)
    return spans


def _blocks(files: list[Span], missing: list[str]) -> dict[str, list[Span]]:
    """Contiguous blocks of each file, cut at the ends of lines."""
    spans: dict[str, list[Span]] = {split: [] for split in ("train", *missing)}
    for path, first, last in files:
        # The end of each file is held out, one share per missing split, cut at the start of a line.
        shares = [1 - n * _HELD_OUT for n in range(len(missing), 0, -1)]
        cuts = [first, *(_line_start(path, first + int((last - first) * share)) for share in shares), last]
        for split, start, end in zip(spans, cuts[:-1], cuts[1:], strict=True):
            if start < end:
                spans[split].append(Span(path, start, end))
    return spans


def _line_start(path: str, offset: int) -> int:
    """The first start of a line at or after `offset`; in text without line ends nearby, the start of a character."""
    with _open(path) as file:
        file.seek(offset)
        block = file.read(_BLOCK)
    # Without a line end nearby, cut between two characters of UTF-8.
    newline = block.find(b"\n")
    if newline >= 0:
        return offset + newline + 1
    continuation = (byte & 0b1100_0000 == 0b1000_0000 for byte in block)
    return offset + next((i for i, inside in enumerate(continuation) if not inside), 0)


def _read(span: Span) -> Iterator[str]:
    # Blocks are decoded incrementally, and cut at the last line end; what is after it waits for the next block.
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, rest = span.start, ""
    with _open(span.path) as file:
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
