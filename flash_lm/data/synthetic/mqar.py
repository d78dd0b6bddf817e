"""Multi-query associative recall, MQAR ("Zoology", Arora et al. 2023, arXiv:2312.04927, section 4).

A row first binds n keys to values, k₁ v₁ … kₙ vₙ. After that each key stands once more, as a query, and the target
there is its value, which the row itself does not have a second time:

    inputs    k₁ v₁ k₂ v₂  ·  ·  k₂ ·  ·  ·  k₁ ·
    targets                      v₂          v₁

Keys are the words 1 … V/2 − 1, values are V/2 … V − 1, each drawn without replacement. With L tokens in a row, the
queries stand at 2n + 2g, for n gaps g that are drawn without replacement from 0 … (L − 2n)/2 − 1 with probabilities in
proportion to (g + 1)^(a − 1). All other positions after the bindings hold filler.

The n-th row of a split is a pure function of split and n, made when it is read. No two splits share random numbers.
"""

import bisect
import hashlib
import itertools

import numpy as np

from flash_lm.config.keys import above, at_least, key, section
from flash_lm.data.corpora import CorpusKind
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import NO_TARGET, Example, ExampleCorpus
from flash_lm.data.tokenizer import NumberTokenizer

_FILLER = 0  # without data.mqar.random_filler
_DRAWS = 0x3A42  # keeps its rows separate from other random numbers


_SCORED = (
    (64, 4, 1000),
    (64, 8, 1000),
    (64, 16, 1000),
    (128, 32, 1000),
    (256, 64, 1000),
)  # of MQAR, as published, up to 256 tokens


def _parts(parts: tuple) -> str | None:
    good = all(
        isinstance(part, tuple) and len(part) == 3 and all(type(x) is int and x > 0 for x in part) for part in parts
    )
    if good and parts and all(4 * pairs <= length and length % 2 == 0 for length, pairs, _ in parts):
        return None
    return "a tuple of (tokens, pairs, examples), such as ((64, 4, 1000),), of even lengths, 4 or more tokens per pair"


@section("data.mqar")
class MQAROptions:
    """Options of data.corpus=mqar."""

    words: int = key(8192, "V; half of them are keys, half are values", at_least(16))
    train: tuple = key(
        ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)),
        "(tokens, pairs, examples) of each part of the training split",
        _parts,
    )
    validation: tuple = key(
        _SCORED,
        "the same of the validation split",
        _parts,
    )
    test: tuple = key(
        _SCORED,
        "the same of the test split",
        _parts,
    )
    power: float = key(0.01, "a: below 1, queries come soon after the bindings", above(0))
    random_filler: bool = key(
        True, "filler of random words, some of which are keys by chance; false: the word 0, which is no key"
    )

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        most = max(pairs for _, pairs, _ in self.train + self.validation + self.test)
        if most < self.words // 2:
            return []
        return [f"data.mqar.words={self.words} has too few keys for {most} pairs: set it to {2 * most + 2} or more"]


class Recall:
    """A split of associative recall."""

    def __init__(self, split: str, parts: tuple[tuple[int, int, int], ...], options: MQAROptions):
        """Samples each row on access; rows of a part follow each other."""
        self._split, self._parts, self._options = SPLITS.index(split), parts, options
        self._ends = list(itertools.accumulate(rows for _, _, rows in parts))
        self.longest = max(length for length, _, _ in parts)

    def __len__(self) -> int:
        """The number of rows."""
        return self._ends[-1]

    def parts(self) -> dict[str, range]:
        """The rows of each part, by name."""
        starts = [0, *self._ends]
        return {
            f"{pairs} pairs in {length} tokens": range(starts[i], self._ends[i])
            for i, (length, pairs, _) in enumerate(self._parts)
        }

    def example(self, number: int, length: int) -> Example:
        """A row; the length of the rows that it is put into does not matter."""
        del length
        length, pairs, _ = self._parts[bisect.bisect_right(self._ends, number)]
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((_DRAWS, self._split, number))))
        # Bindings of keys to values, and queries after them, drawn by a power law of the distance.
        half = self._options.words // 2
        keys = 1 + draw.choice(half - 1, pairs, replace=False)
        values = half + draw.choice(self._options.words - half, pairs, replace=False)
        gaps = np.arange((length - 2 * pairs) // 2)
        likely = (gaps + 1.0) ** (self._options.power - 1)
        asked_at = 2 * pairs + 2 * draw.choice(gaps, pairs, replace=False, p=likely / likely.sum())
        # Keys alternate with values at the start; queries are at even positions after them.
        filler = draw.integers(self._options.words, size=length) if self._options.random_filler else _FILLER
        ids, targets = np.full(length, filler, np.int32), np.full(length, NO_TARGET, np.int32)
        ids[: 2 * pairs : 2], ids[1 : 2 * pairs : 2] = keys, values
        ids[asked_at], targets[asked_at] = keys, values
        return Example(ids, targets=targets)


def mqar(options: MQAROptions) -> ExampleCorpus:
    """All splits of the task."""
    fingerprint = hashlib.sha256(f"mqar {options}".encode()).hexdigest()
    splits = {split: Recall(split, getattr(options, split), options) for split in SPLITS}
    return ExampleCorpus("mqar", fingerprint, NumberTokenizer(options.words), splits)


MQAR = CorpusKind(
    lambda config, known, options: mqar(options), examples=True, answers=None, reads_path=False, sections=(MQAROptions,)
)
