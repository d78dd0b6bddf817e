"""In-context bigrams: each row has a different rule for what follows what.

From "The Evolution of Statistical Induction Heads" (Edelman et al. 2024, arXiv:2402.11004, section 2). A row draws, for
each of S symbols, the probabilities of the next one from a symmetric Dirichlet distribution, and then a Markov chain
with them, whose first symbol is uniform. Nothing is shared between rows, so a model can only count what followed the
same symbol earlier in the row. With a small concentration each symbol has nearly one successor: the task of induction
heads. `best_log_probs` is the best that any model can do.

The n-th row of a split is a pure function of split and n, made when it is read. No two splits share random numbers.
"""

import hashlib
import itertools
import string

import numpy as np

from flash_lm.config.keys import above, at_least, key, section
from flash_lm.data.corpora import CorpusKind
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.tokenizer import CharacterTokenizer

_COUNTS = {"train": 1 << 20, "validation": 1 << 9, "test": 1 << 11}
_DRAWS = 0xB16  # keeps its rows separate from other random numbers


LETTERS = string.ascii_letters


@section("data.bigrams")
class BigramOptions:
    """Options of data.corpus=bigrams."""

    symbols: int = key(16, "S", lambda x: None if 2 <= x <= len(LETTERS) else f"2 to {len(LETTERS)}")
    concentration: float = key(0.1, "of the Dirichlet distribution; small: each symbol has few successors", above(0))
    length: int = key(
        None, "tokens per example, to be read in sequences that carry their state; open: one sequence", at_least(1)
    )


class Bigrams:
    """A split of rows with in-context bigrams."""

    def __init__(self, split: str, options: BigramOptions, tokenizer: CharacterTokenizer):
        """Samples each row on access."""
        self.longest, self.size = options.length or 1, options.length
        self._split, self._options, self._tokenizer = split, options, tokenizer
        self._symbols = np.arange(options.symbols, dtype=np.int32) + tokenizer.unknown + 1

    def __len__(self) -> int:
        """The number of rows."""
        return _COUNTS[self._split]

    def example(self, number: int, length: int) -> Example:
        """Begin-of-text and `data.bigrams.length` symbols, or as many as a row has tokens."""
        return Example(np.append(self._tokenizer.begin, self._symbols[self.chain(number, length)]).astype(np.int32))

    def chain(self, number: int, length: int) -> np.ndarray:
        """The numbers of a row's symbols, 0 … S − 1; the row's length counts if `data.bigrams.length` is open."""
        length = self.size or length
        key = (_DRAWS, SPLITS.index(self._split), number)
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        count = self._options.symbols
        # The rule of this row: the distribution of successors of each symbol.
        rule = draw.dirichlet(np.full(count, self._options.concentration), count)
        # Rounding may leave the last sum below one.
        bounds, quantiles = np.minimum(rule.cumsum(axis=1), 1.0), draw.random(length)
        bounds[:, -1] = 1.0
        chain = np.empty(length, np.int64)
        chain[0] = int(quantiles[0] * count)
        for i in range(1, length):
            chain[i] = np.searchsorted(bounds[chain[i - 1]], quantiles[i], side="right")
        return chain

    def best_nll(self, number: int, length: int) -> float:
        """The loss of a row, in nats, of the best reader."""
        return -float(best_log_probs(self.chain(number, length), self._options).sum())


def best_log_probs(chain: np.ndarray, options: BigramOptions) -> np.ndarray:
    """Log-probability of each symbol after those before it, in nats, for a reader who knows how rows are drawn.

    After a symbol i that j followed n_ij times: (n_ij + α) / (n_i + S α), α the concentration; the first: 1 / S.
    """
    count, alpha = options.symbols, options.concentration
    seen = np.zeros((count, count))
    log_probs = [-np.log(count)]
    for before, after in itertools.pairwise(chain):
        log_probs.append(np.log((seen[before, after] + alpha) / (seen[before].sum() + count * alpha)))
        seen[before, after] += 1
    return np.array(log_probs)


def bigrams(options: BigramOptions) -> ExampleCorpus:
    """All splits of the task."""
    tokenizer = CharacterTokenizer(LETTERS[: options.symbols])
    fingerprint = hashlib.sha256(f"bigrams {options} {_COUNTS}".encode()).hexdigest()
    splits = {split: Bigrams(split, options, tokenizer) for split in SPLITS}
    return ExampleCorpus("bigrams", fingerprint, tokenizer, splits)


BIGRAMS = CorpusKind(
    lambda config, known, options: bigrams(options),
    examples=True,
    answers=None,
    reads_path=False,
    sections=(BigramOptions,),
)
