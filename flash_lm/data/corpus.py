"""What a corpus is: text in pieces, split by document into train, validation and test."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

SPLITS = ("train", "validation", "test")


class Piece(NamedTuple):
    """A part of a document's text, at most about a megabyte, cut at a line's end where there is one."""

    text: str
    begins_document: bool


class Corpus(Protocol):
    """A corpus is read as a stream, a document as one or more pieces.

    Attributes:
        name: for messages and cache names.
        fingerprint: hash of the content.
    """

    name: str
    fingerprint: str

    def size(self, split: str) -> int:
        """Bytes of a split."""
        ...

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document."""
        ...
