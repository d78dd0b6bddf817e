"""A needle in a haystack, in bytes: a number that stands somewhere in a long text is asked for at its end.

    … text … The code of kudapo is 4821. … text … The code of renomi is 0375. … text … The code of kudapo is 4821

Only the last digits are predicted. A row has several needles with different names, so the name matters. The text comes
from the same split of the corpus, from a random offset; after its end it begins again. A row has `data.needle.length`
tokens, or as many as fit: so a model is asked at lengths beyond those of its training, in longer rows or with a state
that is carried.

The n-th row of a split is a pure function of the text, split and n, made when it is read. The needle that is asked for
is in tenth n mod 10 of the text.
"""

import hashlib

import numpy as np

from flash_lm.config.data import DataConfig
from flash_lm.config.keys import at_least, key, section
from flash_lm.data.corpora import CorpusKind
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.text_files import stdlib, text_files
from flash_lm.data.tokenizer import SPECIALS, ByteTokenizer
from flash_lm.errors import InputError

_COUNTS = {"train": 1 << 20, "validation": 200, "test": 1000}
_DEPTHS = 10
_MOST_TEXT = 1 << 23  # bytes of a split that rows are cut from
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_DRAWS = 0x9EED  # keeps its rows separate from other random numbers


def _between(x: int, low: int, high: int) -> str | None:
    return None if low <= x <= high else f"{low} to {high}"


@section("data.needle")
class NeedleOptions:
    """Options of data.corpus=needle."""

    needles: int = key(4, "names with a code each, one of which is asked for", lambda x: _between(x, 1, 64))
    digits: int = key(4, "of a code, which are predicted", lambda x: _between(x, 1, 9))
    length: int = key(
        None, "tokens per example, to be read in sequences that carry their state; open: one sequence", at_least(1)
    )


class Needles:
    """A split of needles in haystacks."""

    def __init__(self, split: str, text: np.ndarray, options: NeedleOptions):
        """Cuts each row from the text, a split's bytes, on access."""
        self._split, self._text, self._options = split, text, options
        # Begin-of-text is read, and the last digit is not.
        self.smallest = sum(len(part) for part in self._parts(self._draw(0)))
        self.longest, self.size = options.length or self.smallest, options.length

    def __len__(self) -> int:
        """The number of rows."""
        return _COUNTS[self._split]

    def parts(self) -> dict[str, range]:
        """The rows of each depth, by name."""
        return {
            f"depth {100 * i // _DEPTHS} to {100 * (i + 1) // _DEPTHS} %": range(i, len(self), _DEPTHS)
            for i in range(_DEPTHS)
        }

    def example(self, number: int, length: int) -> Example:
        """Begin-of-text, text with needles, and the question with its answer."""
        draw = self._draw(number)
        *needles, question = self._parts(draw)
        room = (self._options.length or length) - sum(map(len, needles)) - len(question)
        text = np.take(self._text, draw.integers(len(self._text)) + np.arange(room), mode="wrap")
        # The first needle is the one asked for.
        offsets = (draw.random(len(needles)) * (len(text) + 1)).astype(np.int64)
        offsets[0] = (number % _DEPTHS + draw.random()) / _DEPTHS * (len(text) + 1)
        pieces, before = [], 0
        for i in np.argsort(offsets, kind="stable"):
            pieces += [text[before : offsets[i]], needles[i]]
            before = offsets[i]
        row = np.concatenate([*pieces, text[before:], question]).astype(np.int32) + len(SPECIALS)
        ids = np.concatenate([[ByteTokenizer.begin], row]).astype(np.int32)
        return Example(ids, prompt_length=len(ids) - self._options.digits)

    def _draw(self, number: int) -> np.random.Generator:
        key = (_DRAWS, SPLITS.index(self._split), number)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))

    def _parts(self, draw: np.random.Generator) -> list[np.ndarray]:
        """The needles, and the question about the first of them with its answer; of the same sizes in every row."""
        count, digits = self._options.needles, self._options.digits
        # The first syllables differ, so all names do.
        first = draw.choice(len(_SYLLABLES), count, replace=False)
        others = draw.integers(len(_SYLLABLES), size=(count, 2))
        codes = draw.integers(10**digits, size=count)
        facts = [
            f"The code of {''.join(_SYLLABLES[i] for i in (a, *rest))} is {code:0{digits}}"
            for a, rest, code in zip(first, others, codes, strict=True)
        ]
        texts = [*(f"\n{fact}.\n" for fact in facts), f"\n{facts[0]}"]
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def needle(config: DataConfig, options: NeedleOptions) -> ExampleCorpus:
    """All splits of the task.

    Raises:
        InputError: no such text, or rows are too short for the needles.
    """
    # Rows are cut from the first megabytes of each split.
    source = text_files(config) if config.path else stdlib(config)
    splits = {}
    for split in SPLITS:
        text, size = [], 0
        for piece in source.pieces(split):
            text.append(piece.text.encode())
            size += len(text[-1])
            if size >= _MOST_TEXT:
                break
        splits[split] = Needles(split, np.frombuffer(b"".join(text), np.uint8), options)
        if options.length and options.length < splits[split].smallest:
            raise InputError(
                f"data.needle.length={options.length} is too short: needles and question have "
                f"{splits[split].smallest} tokens"
            )
    fingerprint = hashlib.sha256(f"needle {source.fingerprint} {options} {_COUNTS}".encode()).hexdigest()
    return ExampleCorpus("needle", fingerprint, ByteTokenizer(), splits)


NEEDLE = CorpusKind(
    lambda config, known, options: needle(config, options),
    examples=True,
    tokenizer=ByteTokenizer(),
    answers=None,
    sections=(NeedleOptions,),
)
