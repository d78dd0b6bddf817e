"""ListOps: nested operations on digits, whose value is a label ("Long Range Arena", Tay et al. 2020, section 2.2.1).

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]    is 5

The published rule makes a tree from the root, which has depth 1. Below the largest depth a node is an operation with
probability 1/4, and otherwise a digit; at that depth it is a digit. An operation is MIN, MAX, MED (the median, rounded
down) or SM (the sum modulo 10) of 2 to 10 nodes. A tree is kept if its number of symbols is in the range; "[MAX" and
"]" are one symbol each. That makes 15 symbols.

The n-th row of a split is a pure function of split and n, made when it is read. No two splits share random numbers.
"""

import hashlib
import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from flash_lm.config.keys import at_least, key, section
from flash_lm.data.corpora import CorpusKind
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.tokenizer import CharacterTokenizer
from flash_lm.errors import InputError

OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
_NAMES = tuple(OPERATIONS)
_OPERATIONS, _FEWEST = 0.25, 2  # probability of an operation, and the fewest arguments that it has
_MOST_TRIES = 20_000  # of the published kind one in twelve is kept
SYMBOLS = (*map(str, range(10)), *_NAMES, "]")
# A character a symbol, for the tokenizer.
_CHARACTERS = dict(zip(SYMBOLS, "0123456789nxms]", strict=True))


def _between(x: int, low: int, high: int) -> str | None:
    return None if low <= x <= high else f"{low} to {high}"


@section("data.listops")
class ListOpsOptions:
    """Options of data.corpus=listops."""

    longer_than: int = key(500, "symbols", at_least(1))
    shorter_than: int = key(2000, "symbols; 4 more than the other bound, or further", at_least(5))
    depth: int = key(10, "of a tree; its root has 1", lambda x: _between(x, 2, 64))
    arguments: int = key(10, "of an operation at most; it has 2 or more", at_least(2))
    train: int = key(96_000, "examples of the training split", at_least(1))
    test: int = key(2000, "examples of the validation split, and of the test split", at_least(1))

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        largest = _symbols_of_the_largest(self.depth, self.arguments)
        if self.longer_than + 3 < self.shorter_than and self.longer_than < largest:
            return []
        return [
            f"no tree has more than data.listops.longer_than={self.longer_than} and fewer than "
            f"data.listops.shorter_than={self.shorter_than} symbols: a tree has up to {largest}"
        ]


def _symbols_of_the_largest(depth: int, arguments: int) -> int:
    nodes = [arguments**level for level in range(depth)]
    return nodes[-1] + 2 * sum(nodes[:-1])


class ListOps:
    """A split of ListOps expressions."""

    def __init__(self, split: str, rows: int, options: ListOpsOptions, tokenizer: CharacterTokenizer):
        """Draws each row on access."""
        self._split, self._rows, self._options, self._tokenizer = split, rows, options, tokenizer
        self.longest = options.shorter_than - 1  # begin-of-text and all symbols but the last are read

    def __len__(self) -> int:
        """The number of rows."""
        return self._rows

    def example(self, number: int, length: int) -> Example:
        """Begin-of-text and the symbols of a tree, with its value as the label."""
        del length
        symbols, value = self.tree(number)
        (ids,) = self._tokenizer.encode(["".join(_CHARACTERS[symbol] for symbol in symbols)])
        return Example(np.concatenate([[self._tokenizer.begin], ids]).astype(np.int32), label=value)

    def tree(self, number: int) -> tuple[list[str], int]:
        """The symbols of a row's tree, and its value."""
        # NumPy takes several times as long for single numbers. Of Python's generator only this method is the same in
        # all versions.
        draw = random.Random(f"listops {self._split} {number}").random
        for _ in range(_MOST_TRIES):
            symbols: list[str] = []
            value = _grow(symbols, 1, draw, self._options)
            if value is not None and len(symbols) > self._options.longer_than:
                return symbols, value
        options = self._options
        raise InputError(
            f"of {_MOST_TRIES} trees none had more than data.listops.longer_than={options.longer_than} and fewer than "
            f"data.listops.shorter_than={options.shorter_than} symbols: change them, or raise data.listops.depth"
        )


def _grow(symbols: list[str], depth: int, draw: Callable[[], float], options: ListOpsOptions) -> int | None:
    """Adds a node at this depth to the symbols; returns its value, or None as soon as there are too many symbols."""
    # Nodes at the greatest depth are digits, and so is a share of the others.
    if depth >= options.depth or draw() >= _OPERATIONS:
        symbols.append(str(_below(10, draw)))
        return int(symbols[-1])
    name = _NAMES[_below(len(_NAMES), draw)]
    symbols.append(name)
    values = []
    for _ in range(_FEWEST + _below(options.arguments - _FEWEST + 1, draw)):
        value = _grow(symbols, depth + 1, draw, options)
        if value is None or len(symbols) >= options.shorter_than - 1:
            return None
        values.append(value)
    symbols.append("]")
    return OPERATIONS[name](values)


def _below(bound: int, draw: Callable[[], float]) -> int:
    return int(bound * draw())


def listops(options: ListOpsOptions) -> ExampleCorpus:
    """All splits of the task.

    Raises:
        InputError: hardly any tree has the wanted size.
    """
    tokenizer = CharacterTokenizer("".join(_CHARACTERS.values()))
    fingerprint = hashlib.sha256(f"listops {options}".encode()).hexdigest()
    rows = {"train": options.train, "validation": options.test, "test": options.test}
    splits = {split: ListOps(split, rows[split], options, tokenizer) for split in SPLITS}
    splits["train"].tree(0)  # raises here, and not in training, if no tree is kept
    return ExampleCorpus("listops", fingerprint, tokenizer, splits, labels=tuple(map(str, range(10))))


LISTOPS = CorpusKind(
    lambda config, known, options: listops(options),
    examples=True,
    answers=None,
    reads_path=False,
    labelled=lambda config: True,
    sections=(ListOpsOptions,),
)
