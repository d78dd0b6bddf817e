"""What a corpus is: text in pieces, split by document into train, validation and test."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

_PIECE = 1 << 20  # characters

SPLITS = ("train", "validation", "test")
WHOLE = "whole"  # one more split: all documents, of a data set those of data.split


class Piece(NamedTuple):
    """A part of a document's text, at most about a megabyte, cut at a line's end where there is one."""

    text: str
    begins_document: bool


class DocumentStream(Protocol):
    """Documents that are read while training goes on, and whose place can be found again."""

    def share(self, host: int, hosts: int) -> "DocumentStream":
        """The documents of one host."""
        ...

    def documents(self, epoch: int) -> Iterator[str]:
        """All documents once; in the epoch of a place that was restored, from there on."""
        ...

    def state(self) -> dict[str, Any]:
        """The place after the last document, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a place that `state` gave."""
        ...


class Corpus(Protocol):
    """A corpus is read as a stream, a document as one or more pieces.

    Attributes:
        name: for messages and cache names.
        fingerprint: hash of the content.
        stream: the training split, if it is to be read while training goes on.
    """

    name: str
    fingerprint: str
    stream: DocumentStream | None

    def size(self, split: str) -> int | None:
        """Bytes of a split; None where only reading it would tell."""
        ...

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document."""
        ...


def cut(text: str) -> Iterator[Piece]:
    """A document in pieces; none if there is nothing but white space."""
    start = 0 if text.strip() else len(text)
    while start < len(text):
        end = len(text)
        if end - start > _PIECE:
            end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield Piece(text[start:end], begins_document=start == 0)
        start = end
