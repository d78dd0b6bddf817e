"""SentencePiece, trained on the corpus or read from a file; saves and loads tokenizers of all kinds.

Bytes, and SentencePiece models trained here, restore any text exactly.
"""

import hashlib
import io
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece

from flash_lm.data.foreign_tokenizer import SPACE, HuggingFaceTokenizer
from flash_lm.data.tokenizer import (
    MASK,
    ByteTokenizer,
    CharacterTokenizer,
    NumberTokenizer,
    Tokenizer,
    byte_piece,
)
from flash_lm.errors import InputError
from flash_lm.runs.json_file import load_json

_MODEL_FILE, LAST_FILE = "sentencepiece.model", "kind.json"  # the first holds the model, whatever its kind
_TRAINING_THREADS = 2  # a trained model holds the number, so that another one would be another tokenizer


class SentencePieceTokenizer:
    """A tokenizer with a SentencePiece model.

    Attributes:
        spells_spaces: whether a space is a token of a byte, since no piece has one.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        """Loads a serialised model.

        Raises:
            InputError: not a SentencePiece model, or begin- or end-of-text is missing.
        """
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise InputError("not a SentencePiece model: give a .model file in --config.data.tokenizer_path") from None
        self._model = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.begin, self.end = self._processor.bos_id(), self._processor.eos_id()
        self.vocab_size = self._processor.get_piece_size()
        if self.begin < 0 or self.end < 0:
            raise InputError("the SentencePiece model lacks begin- or end-of-text: train it with bos_id and eos_id")
        mask = self._processor.piece_to_id(MASK)
        # A model from elsewhere has none: use the id after the last.
        self.mask = mask if self._processor.is_control(mask) else self.vocab_size
        self._spelled = self._spell()
        self.spells_spaces = " " in self._spelled

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without special tokens."""
        # Encode all texts at once, and again those with characters that SentencePiece would not restore.
        ids = self._processor.encode(list(texts), num_threads=os.cpu_count() or 1)
        arrays = [np.asarray(x, np.int32) for x in ids]
        for i, text in enumerate(texts):
            if not self._spelled.keys().isdisjoint(text):
                arrays[i] = self._encode_around(text)
        return arrays

    def _spell(self) -> dict[str, list[int]]:
        """The byte tokens of characters that SentencePiece would not restore; none if the model has no bytes.

        It writes a space as another character, which it decodes as a space. In a vocabulary without that one, of text
        with few spaces, it spells this character where a space stood.
        """
        # Spelling out spaces works only if pieces for single bytes exist and no space is added in front.
        spelled = {x: [self._processor.piece_to_id(byte_piece(byte)) for byte in x.encode()] for x in (SPACE, " ")}
        first = self._processor.encode("x")[:1]
        begins_with_blank = any(self._processor.id_to_piece(i).startswith(SPACE) for i in first)
        if begins_with_blank or not all(self._processor.is_byte(i) for ids in spelled.values() for i in ids):
            return {}
        if any(SPACE in self._processor.id_to_piece(i) for i in range(self.vocab_size)):
            del spelled[" "]
        return spelled

    def _encode_around(self, text: str) -> np.ndarray:
        """Encodes text that has characters to be spelled, and the text between them."""
        ids: list[int] = []
        for part in re.split(f"([{''.join(self._spelled)}])", text):
            ids += self._spelled[part] if part in self._spelled else self._processor.encode(part)
        return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text; special tokens are left out."""
        return self._processor.decode([int(i) for i in ids if i < self.vocab_size])

    def token_bytes(self, i: int) -> bytes:
        """The bytes of text that an id stands for; empty for special tokens."""
        if i >= self.vocab_size or self._processor.is_control(i) or self._processor.is_unknown(i):
            return b""
        piece = self._processor.id_to_piece(i)
        if self._processor.is_byte(i):
            return bytes([int(piece[1:-1], 16)])  # <0x41>
        return piece.replace(SPACE, " ").encode()

    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text that each id stands for, (V,) int32; 0 for special tokens."""
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int32)

    def model_bytes(self) -> bytes:
        """The serialised model, which `load_tokenizer` reads according to the kind."""
        return self._model


# kind -> from `model_bytes`
_KINDS = {
    "bytes": lambda model: ByteTokenizer(),
    "sentencepiece": SentencePieceTokenizer,
    "characters": lambda model: CharacterTokenizer(model.decode()),
    "numbers": lambda model: NumberTokenizer(int(model)),
    "hf": HuggingFaceTokenizer,
}


def train_sentencepiece(lines: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Trains byte-pair encoding that restores any text exactly: no normalisation, and bytes for rare characters.

    Args:
        lines: lines, with their line ends.
        vocab_size: size of the vocabulary, special tokens included.

    Raises:
        InputError: the text has too few different pieces for this vocabulary.
    """
    model = io.BytesIO()
    broken: list[InputError] = []

    # Train with fixed settings; the reader's errors are kept, and raised after the trainer's.
    def until_broken() -> Iterator[str]:
        # An exception inside the trainer's iterator would be raised as an unrelated one.
        try:
            yield from lines
        except InputError as error:
            broken.append(error)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=until_broken(),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            normalization_rule_name="identity",
            byte_fallback=True,
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 16,
            num_threads=_TRAINING_THREADS,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=4,
            control_symbols=[MASK],
            user_defined_symbols=["\n"],
            minloglevel=2,
        )
    # Explain the trainer's error, unless the reader's was first.
    except RuntimeError as error:
        if broken:
            raise broken[0] from None
        most = re.search(r"value <= (\d+)", str(error))
        advice = f" to {most[1]} or less" if most else ""
        raise InputError(
            f"the corpus is too small for data.vocab_size={vocab_size}: lower --config.data.vocab_size{advice}, or set "
            f"--config.data.tokenizer=bytes"
        ) from None
    if broken:
        raise broken[0]
    return SentencePieceTokenizer(model.getvalue())


def save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Writes a folder that `load_tokenizer` can read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MODEL_FILE).write_bytes(tokenizer.model_bytes())
    (folder / LAST_FILE).write_text(json.dumps({"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size}) + "\n")


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Reads what `save_tokenizer` wrote.

    Raises:
        InputError: the folder holds no tokenizer.
    """
    # A folder of a user may hold anything under these names.
    try:
        info, model = load_json(folder / LAST_FILE), folder / _MODEL_FILE
        if not model.is_file():  # a pipe would wait for ever
            raise FileNotFoundError
        return _KINDS[info["kind"]](model.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{folder} holds no tokenizer, or a damaged one: restore it, or train into a new --workdir"
        ) from None
