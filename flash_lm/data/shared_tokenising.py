"""Tokenising a split on all hosts: each takes every n-th block of documents, and the first one joins their parts.

The result is that of `encode` on one host, byte by byte. All hosts read all of the text, which takes much less time
than to tokenise it. They meet every few seconds, so that a host which fails ends all.
"""

import contextlib
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from flash_lm.config.addresses import is_remote
from flash_lm.data.corpus import Piece
from flash_lm.data.tokenized_text import encode
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError, RunError
from flash_lm.runs.hosts import Problem, check_problems, gather_from_hosts, is_first, on_all_hosts
from flash_lm.runs.local_copy import fetch
from flash_lm.runs.storage import explain_errors, upload

Counts = dict[str, Any]
_BLOCK = 4 << 20  # characters of text
_COPIED = 16 << 20  # bytes at a time
_MEET_EVERY_S = 5.0
_MOST_BLOCKS = 1000  # between two meetings
_DIFFERENT = "the hosts have read different text: give all of them the same files, which no process changes"


def encode_shared(
    pieces: Iterable[Piece],
    batches: Callable[[Iterable[Piece]], Iterator[list[Piece]]],
    tokenizer: Tokenizer,
    parts: "Parts",
    show: Callable[[int], None],
) -> tuple[np.ndarray, Counts] | None:
    """Streams a split through a tokenizer, on all hosts at once, into one file on the first.

    Args:
        pieces: the text of the split, the same on all hosts.
        batches: cuts pieces into batches, each small enough for memory.
        tokenizer: the tokenizer.
        parts: the files of the hosts.
        show: receives the number of bytes of text that all hosts together have done.

    Returns:
        On the first host starts and counts, as `encode`; None on the others.

    Raises:
        InputError: the hosts have read different text.
        RunError: another host has failed.
    """
    host, hosts = jax.process_index(), jax.process_count()
    meetings = _Meetings(show)
    # This host's blocks, one after another in a file, and the starts and counts of each.
    blocks: list[tuple[np.ndarray, Counts]] = []
    count = 0
    try:
        with open(parts.tokens(host), "wb") as file:
            write = lambda ids: file.write(ids.astype(parts.dtype).tobytes())
            for number, block in _blocks(pieces):
                if number % hosts == host:
                    blocks.append(encode(batches(block), tokenizer, write))
                    meetings.done += blocks[-1][1]["bytes"]
                count = number + 1
                meetings.after(count)
            file.flush()
            os.fsync(file.fileno())
        parts.save_starts(host, [starts for starts, _ in blocks])
        parts.upload(host)
        meetings.end()
    except Exception as error:
        meetings.report(error)
        raise

    # All parts are complete.
    results = gather_from_hosts([count, _add_counts([_with_documents(*block) for block in blocks])])
    if len({count for count, _ in results}) > 1:
        raise InputError(_DIFFERENT)
    joined = on_all_hosts(lambda: parts.join(hosts, count) if is_first() else None)
    counts = _add_counts([counts for _, counts in results])
    if len(counts["part_documents"]) < 2:
        del counts["part_documents"]  # no mixture
    return None if joined is None else (joined, counts)


class _Meetings:
    """Meetings of all hosts after the same blocks, at which they exchange how much is done, and problems.

    Attributes:
        done: bytes of text that this host has done.
    """

    def __init__(self, show: Callable[[int], None]):
        """`show`: receives the bytes that all hosts have done."""
        self.done, self._show, self._next, self._since = 0, show, 1, time.monotonic()
        self._is_over = False

    def after(self, block: int) -> None:
        """Meets the others, if this is a block after which all do."""
        if block < self._next:
            return
        slowest = max(seconds for _, seconds, *_ in self._meet(is_end=False))
        self._next = block + max(1, min(_MOST_BLOCKS, int(_MEET_EVERY_S * block / max(slowest, 1e-3))))

    def end(self) -> None:
        """Waits for all hosts at the end of their parts."""
        self._meet(is_end=True)

    def report(self, error: Exception) -> None:
        """Tells the others, who come to their next meeting, of this host's error; not if it is one of theirs."""
        if not self._is_over:
            self._is_over = True
            gather_from_hosts([self.done, 0.0, False, Problem.of(error)])

    def _meet(self, *, is_end: bool) -> list[Any]:
        answers = gather_from_hosts([self.done, time.monotonic() - self._since, is_end, None])
        problems = [problem for *_, problem in answers]
        self._is_over = any(problems) or any(end != is_end for _, _, end, _ in answers)
        check_problems(problems)
        if self._is_over:
            raise InputError(_DIFFERENT)
        self._show(sum(done for done, *_ in answers))
        return answers


def _blocks(pieces: Iterable[Piece]) -> Iterator[tuple[int, Iterator[Piece]]]:
    """Blocks of complete documents, numbered from 0; what is not read of one is skipped."""

    def numbered() -> Iterator[tuple[int, Piece]]:
        number = size = 0
        for piece in pieces:
            if piece.begins_document and size >= _BLOCK:
                number, size = number + 1, 0
            size += len(piece.text)
            yield number, piece

    for number, block in itertools.groupby(numbered(), key=lambda pair: pair[0]):
        yield number, (piece for _, piece in block)


class Parts(NamedTuple):
    """The files of one split: a part of each host, and the whole.

    Attributes:
        folder: where the files lie on this machine.
        shared: through which hosts exchange them: the same folder on a shared disk, or one in an object store.
        name: name of the split.
        dtype: of the tokens.
    """

    folder: pathlib.Path
    shared: pathlib.Path
    name: str
    dtype: type[np.unsignedinteger]

    def tokens(self, host: int) -> pathlib.Path:
        """The file of a host's tokens, block after block."""
        return self.folder / f"{self.name}.part-{host}"

    def starts(self, host: int) -> pathlib.Path:
        """The file of the starts in each block of a host."""
        return self.folder / f"{self.name}.part-{host}.starts"

    def save_starts(self, host: int, blocks: list[np.ndarray]) -> None:
        """Writes the starts in each block, each with the block's number of tokens at the end."""
        with open(self.starts(host), "wb") as file:
            np.save(file, np.array([len(starts) for starts in blocks], np.int64))
            np.save(file, np.concatenate([np.zeros(0, np.int64), *blocks]))
            file.flush()
            os.fsync(file.fileno())

    def upload(self, host: int) -> None:
        """Makes a host's complete files visible to the others."""
        if is_remote(self.shared):
            for path in (self.tokens(host), self.starts(host)):
                with explain_errors(self.shared, RunError):
                    upload(path, self.shared / path.name)

    def join(self, hosts: int, blocks: int) -> np.ndarray:
        """Writes so many blocks of all hosts in their order to one file, and removes the parts; returns all starts."""
        paths = [path for host in range(hosts) for path in (self.tokens(host), self.starts(host))]
        if is_remote(self.shared):
            for path in paths[2:]:  # those of this host, the first one, are here
                fetch(self.shared / path.name)
        starts, written = [], 0
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(self.tokens(host), "rb")) for host in range(hosts)]
            target = stack.enter_context(open(self.folder / f"{self.name}.tokens", "wb"))
            starts_of = [self._read_starts(host) for host in range(hosts)]
            for number in range(blocks):
                *begins, size = next(starts_of[number % hosts])
                starts.append(np.array(begins, np.int64) + written)
                _copy(files[number % hosts], target, int(size) * np.dtype(self.dtype).itemsize)
                written += size
        for path in paths:
            path.unlink()
        return np.concatenate([*starts, np.array([written], np.int64)])

    def _read_starts(self, host: int) -> Iterator[np.ndarray]:
        with open(self.starts(host), "rb") as file:
            sizes, starts = np.load(file), np.load(file)
        return iter(np.split(starts, np.cumsum(sizes)[:-1]) if len(sizes) else [])


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        data = source.read(min(size, _COPIED))
        if not data:
            raise InputError(
                f"{source.name} has lost tokens: give a data.cache_dir on a disk that all hosts share, or in a bucket"
            )
        target.write(data)
        size -= len(data)


def _with_documents(starts: np.ndarray, counts: Counts) -> Counts:
    """Counts with the documents of each part of a mixture, also if only the first one has any."""
    return {"part_documents": [len(starts) - 1]} | counts


def _add_counts(several: list[Counts]) -> Counts:
    total = {name: sum(counts[name] for counts in several) for name in ("words", "lines", "bytes")}
    documents = itertools.zip_longest(*(counts["part_documents"] for counts in several), fillvalue=0)
    return total | {"part_documents": [sum(numbers) for numbers in documents]}
