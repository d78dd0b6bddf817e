"""Tokenised text: each document is begin-of-text, its tokens, end-of-text."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from flash_lm.data.corpus import Piece
from flash_lm.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """The tokens of one split, or of a part of it.

    Attributes:
        tokens: tokens of all documents, in an array that may be memory-mapped.
        starts: where each document begins, and then the total number of tokens, int64.
        words: number of words, separated by white space.
        lines: number of lines; a document's last line needs no line end.
        bytes: number of bytes of text; 0, as words and lines, if this is only a part of a text.
        labels: number of each document's label, int32; None: no labels.
        part_documents: number of documents of each part of a mixture; empty: it is none.
    """

    tokens: np.ndarray
    starts: np.ndarray
    words: int
    lines: int
    bytes: int
    labels: np.ndarray | None = None
    part_documents: Sequence[int] = ()


def encode(
    batches: Iterable[list[Piece]], tokenizer: Tokenizer, write: Callable[[np.ndarray], object]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Streams text through a tokenizer.

    Args:
        batches: batches of pieces, each small enough for memory.
        tokenizer: the tokenizer.
        write: receives the tokens, (n,) int32, part by part.

    Returns:
        Starts, and by name words, lines, bytes and perhaps part_documents, all as in TokenizedText.
    """
    written, starts, in_line = 0, [], False
    counts, documents = {"words": 0, "lines": 0, "bytes": 0}, Counter()
    for batch in batches:
        # Put end-of-text and begin-of-text between documents; the last line of each may lack its line end.
        for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            if piece.begins_document:
                counts["lines"] += in_line  # the last line of the document before
                in_line = False
                specials = [tokenizer.end, tokenizer.begin] if starts else [tokenizer.begin]
                starts.append(written + len(specials) - 1)
                documents[piece.part] += 1
                ids = np.concatenate([np.array(specials, np.int32), ids])
            write(ids)
            written += len(ids)
            counts["words"] += len(piece.text.split())
            counts["lines"] += piece.text.count("\n")
            in_line = in_line if not piece.text else not piece.text.endswith("\n")
            counts["bytes"] += len(piece.text.encode())
    counts["lines"] += in_line
    if starts:
        write(np.array([tokenizer.end], np.int32))
        written += 1
    last = max(documents, default=0)
    parts = {"part_documents": [documents[part] for part in range(last + 1)]} if last else {}
    return np.array([*starts, written], np.int64), counts | parts


def encode_in_memory(pieces: list[Piece], tokenizer: Tokenizer) -> TokenizedText:
    """Tokenises some documents in memory."""
    parts: list[np.ndarray] = []
    starts, counts = encode([pieces], tokenizer, parts.append)
    return TokenizedText(np.concatenate(parts), starts, counts["words"], counts["lines"], counts["bytes"])
