"""The copy task: a word, and the same word again ("Transformers are RNNs", section 4.1), or backwards.

A row is <s> w <s> w, where w is as long as fits and its symbols are sampled from ten. Only the second w is predicted.
The n-th example of a split is a pure function of split and n, and no two splits share random numbers.
"""

import hashlib

import numpy as np

from flash_lm.config.keys import key, section
from flash_lm.data.corpora import CorpusKind
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.tokenizer import CharacterTokenizer

SYMBOLS = "abcdefghij"
_COUNTS = {"train": 1 << 20, "validation": 1 << 10, "test": 1 << 12}


@section("data.copy")
class CopyOptions:
    """Options of data.corpus=copy."""

    reverse: bool = key(False, "the second word is the first one backwards")


class Copying:
    """A split of the copy task."""

    longest = 3  # <s> a <s>, of which a is predicted; it fills any longer row

    def __init__(self, split: str, tokenizer: CharacterTokenizer, reverse: bool = False):
        """Samples each example on access."""
        self._split, self._begin = SPLITS.index(split), tokenizer.begin
        (self._symbols,) = tokenizer.encode([SYMBOLS])
        self._count, self._direction = _COUNTS[split], -1 if reverse else 1

    def __len__(self) -> int:
        """The number of examples."""
        return self._count

    def example(self, number: int, length: int) -> Example:
        """A word of (length − 1) / 2 symbols, rounded down, twice."""
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._split, number))))
        word = draw.choice(self._symbols, (length - 1) // 2)
        ids = np.concatenate([[self._begin], word, [self._begin], word[:: self._direction]])
        return Example(ids.astype(np.int32), prompt_length=len(word) + 2)


def copying(reverse: bool = False) -> ExampleCorpus:
    """All splits of the copy task; `reverse`: the second word is the first one backwards."""
    tokenizer = CharacterTokenizer(SYMBOLS)
    name = "reverse" if reverse else "copy"
    fingerprint = hashlib.sha256(f"{name} {SYMBOLS} {_COUNTS}".encode()).hexdigest()
    return ExampleCorpus(name, fingerprint, tokenizer, {x: Copying(x, tokenizer, reverse) for x in SPLITS})


COPY = CorpusKind(
    lambda config, known, options: copying(options.reverse),
    examples=True,
    answers=None,
    reads_path=False,
    sections=(CopyOptions,),
)
