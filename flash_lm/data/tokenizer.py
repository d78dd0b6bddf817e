"""The interface of tokenizers, and those that need no library: bytes, characters and numbers."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

# The first ids of every tokenizer made here, the same in all of them.
MASK = "[MASK]"


SPECIALS = ("<pad>", "<s>", "</s>", MASK)


def byte_piece(value: int) -> str:
    """A byte as SentencePiece writes it; others have adopted this."""
    return f"<0x{value:02X}>"


class Tokenizer(Protocol):
    """The interface of tokenizers.

    Attributes:
        kind: its name in tokenizer/kind.json.
        fingerprint: the same for equal tokenizers.
        vocab_size: V.
        begin: id that begins a document.
        end: id that ends one.
        mask: id of a masked token; with some tokenizers the first after the vocabulary.
    """

    kind: str
    fingerprint: str
    vocab_size: int
    begin: int
    end: int
    mask: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without special tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text; special tokens are left out."""
        ...

    def token_bytes(self, i: int) -> bytes:
        """The bytes of text that an id stands for; empty for special tokens."""
        ...

    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text that each id stands for, (V,) int32; 0 for special tokens."""
        ...

    def model_bytes(self) -> bytes:
        """The serialised model, which `load_tokenizer` reads according to the kind."""
        ...


class ByteTokenizer:
    """A tokenizer of UTF-8 bytes, whose ids follow the special tokens."""

    kind = "bytes"
    fingerprint = "bytes"
    begin, end, mask = (SPECIALS.index(name) for name in ("<s>", "</s>", MASK))
    vocab_size = len(SPECIALS) + 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without special tokens."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + len(SPECIALS) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; special tokens are left out, invalid UTF-8 is replaced."""
        return bytes(i - len(SPECIALS) for i in ids if i >= len(SPECIALS)).decode(errors="replace")

    def token_bytes(self, i: int) -> bytes:
        """The bytes of text that an id stands for; empty for special tokens."""
        return bytes([i - len(SPECIALS)]) if i >= len(SPECIALS) else b""

    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text that each id stands for, (V,) int32; 0 for special tokens."""
        return np.array([0] * len(SPECIALS) + [1] * 256, np.int32)

    def model_bytes(self) -> bytes:
        """The serialised model, which `load_tokenizer` reads according to the kind."""
        return b""


class CharacterTokenizer:
    """A tokenizer of a fixed set of characters, whose ids follow the special tokens and that of unknown characters."""

    kind = "characters"
    begin, end, mask = (SPECIALS.index(name) for name in ("<s>", "</s>", MASK))
    unknown = len(SPECIALS)

    def __init__(self, characters: str):
        """Takes distinct characters in the order of their ids."""
        self._characters = characters
        self._ids = {character: i for i, character in enumerate(characters, start=self.unknown + 1)}
        self.vocab_size = self.unknown + 1 + len(characters)
        self.fingerprint = hashlib.sha256(f"characters {characters}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without special tokens."""
        return [np.array([self._ids.get(x, self.unknown) for x in text], np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; special tokens and unknown characters are left out."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode()

    def token_bytes(self, i: int) -> bytes:
        """The bytes of text that an id stands for; empty for special tokens and unknown characters."""
        return self._characters[i - self.unknown - 1].encode() if self.unknown < i < self.vocab_size else b""

    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text that each id stands for, (V,) int32; 0 for special tokens and unknown characters."""
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int32)

    def model_bytes(self) -> bytes:
        """The serialised model, which `load_tokenizer` reads according to the kind."""
        return self._characters.encode()


class NumberTokenizer:
    """A tokenizer of numbers below a bound, for made data; their text is the decimal number and a blank."""

    kind = "numbers"
    begin = end = 0  # made data has no documents

    def __init__(self, vocab_size: int):
        """Knows 0 … vocab_size − 1."""
        self.vocab_size = self.mask = vocab_size
        self.fingerprint = f"numbers {vocab_size}"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers of each text, which white space separates; 0 for other words."""
        known = lambda word: word.isdecimal() and int(word) < self.vocab_size
        return [np.array([int(x) if known(x) else 0 for x in text.split()], np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; ids that are no numbers are left out."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode()

    def token_bytes(self, i: int) -> bytes:
        """The bytes of text that an id stands for."""
        return f"{i} ".encode() if 0 <= i < self.vocab_size else b""

    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text that each id stands for, (V,) int32."""
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int32)

    def model_bytes(self) -> bytes:
        """The serialised model, which `load_tokenizer` reads according to the kind."""
        return str(self.vocab_size).encode()
