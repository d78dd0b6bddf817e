"""The interface of a corpus: text in pieces, split by document into train, validation and test."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

_PIECE = 1 << 20  # characters

SPLITS = ("train", "validation", "test")
UNSPLIT = "whole"  # an extra split: all documents; for a data set, those of data.split


class Piece(NamedTuple):
    """A chunk of a document's text, at most about a megabyte, cut at the end of a line if possible.

    text: the text.
    begins_document: whether it is the first of its document.
    part: number of the corpus in a mixture.
    """

    text: str
    begins_document: bool
    part: int = 0


class DocumentStream(Protocol):
    """The interface of a streamed training split, whose position can be saved and restored."""

    def share(self, host: int, hosts: int) -> "DocumentStream":
        """The documents of one host."""
        ...

    def documents(self, epoch: int) -> Iterator[str]:
        """All documents once; in the epoch of a restored position, only those after it."""
        ...

    def state(self) -> dict[str, Any]:
        """The position after the last document, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` returned."""
        ...


class Corpus(Protocol):
    """The interface of a corpus, which is read piece by piece; a document is one or more pieces.

    Attributes:
        name: name for messages and the cache.
        fingerprint: hash of the content.
        stream: the training split, if it is read during training.
    """

    name: str
    fingerprint: str
    stream: DocumentStream | None

    def size(self, split: str) -> int | None:
        """Bytes of a split; None if this is not known without reading it."""
        ...

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, document by document."""
        ...


def cut(text: str) -> Iterator[Piece]:
    """Cuts a document into pieces; none if it is all white space."""
    # Cut after the last line end within the limit; a longer line is cut in the middle.
    start = 0 if text.strip() else len(text)
    while start < len(text):
        end = len(text)
        if end - start > _PIECE:
            end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield Piece(text[start:end], begins_document=start == 0)
        start = end
