"""Passages of held-out text, from the parquet files of a folder such as wiki/test.parquet, with a column `text`."""

import pathlib

import numpy as np
import pyarrow.parquet

from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError

TEXTS = ("wiki", "books")
_CHARACTERS_PER_TOKEN = 6  # more than a token has on average, so that a passage has enough
_ATTEMPTS = 20  # drawn places per passage
_SEED = 0x9A55


class HeldOut:
    """A split of a text."""

    def __init__(self, data: pathlib.Path, text: str, split: str):
        """Reads the documents of a split.

        Args:
            data: the folder that has a folder for each text.
            text: its name.
            split: validation or test.

        Raises:
            InputError: there is no such file, or it has no column `text`.
        """
        self.text, self.split, path = text, split, data / text / f"{split}.parquet"
        try:
            column = pyarrow.parquet.read_table(path, columns=["text"]).column("text")
        except (OSError, pyarrow.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"cannot read {path}: {reason}: --data is a folder with it, with a column text") from None
        self._documents = [document for document in column.to_pylist() if document]

    def passages(self, tokenizer: Tokenizer, count: int, length: int) -> np.ndarray:
        """Passages from random places, each within a document, (count, length + 1) int32; the same at each call.

        A passage is begin-of-text and `length` tokens of text from the beginning of a word. Long documents have more
        of them.

        Raises:
            InputError: too few documents are long enough.
        """
        size = _CHARACTERS_PER_TOKEN * length
        sizes = np.array([max(0, len(document) - size) for document in self._documents])
        draw, rows = np.random.Generator(np.random.Philox(_SEED)), list[np.ndarray]()
        for _ in range(_ATTEMPTS * count if sizes.any() else 0):
            document = self._documents[draw.choice(len(sizes), p=sizes / sizes.sum())]
            start = draw.integers(len(document) - size)
            words = document[start : start + size].split(maxsplit=1)  # the first is cut
            (ids,) = tokenizer.encode(words[1:] or [""])
            if len(ids) >= length:
                rows.append(np.concatenate([[tokenizer.begin], ids[:length]]).astype(np.int32))
            if len(rows) == count:
                return np.stack(rows)
        raise InputError(
            f"the {self.split} split of {self.text} has too few passages of {length} tokens: ask for fewer or shorter "
            "rows"
        )

    def beginning(self, tokenizer: Tokenizer, characters: int) -> np.ndarray:
        """The tokens of its first documents, (n,), of about so many characters."""
        texts, room = list[str](), characters
        for document in self._documents:
            if room > 0:
                texts.append(document[:room])
                room -= len(document)
        return np.concatenate(tokenizer.encode(texts))
