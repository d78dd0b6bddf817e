"""The table's rows of made corpora: examples that a rule draws, as many as are asked for."""

import string
from typing import Any

from flash_lm.config.data import DataConfig
from flash_lm.config.keys import above, at_least, key, section
from flash_lm.data.corpora import CorpusKind, register_corpus

LETTERS = string.ascii_letters
_SCORED = (
    (64, 4, 1000),
    (64, 8, 1000),
    (64, 16, 1000),
    (128, 32, 1000),
    (256, 64, 1000),
)  # of MQAR, as published, up to 256 tokens
_LENGTH = "tokens of an example, to be read in rows that carry their state; open: it fills a row"


def _parts(parts: tuple) -> str | None:
    good = all(
        isinstance(part, tuple) and len(part) == 3 and all(type(x) is int and x > 0 for x in part) for part in parts
    )
    if good and parts and all(4 * pairs <= length and length % 2 == 0 for length, pairs, _ in parts):
        return None
    return "a tuple of (tokens, pairs, rows), such as ((64, 4, 1000),), of even rows with at least 4 tokens a pair"


@section("data.mqar")
class MQAROptions:
    """Options of data.corpus=mqar."""

    words: int = key(8192, "V; half of them are keys, half are values", at_least(16))
    train: tuple = key(
        ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)),
        "(tokens, pairs, rows) of each part of the training split",
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


@section("data.bigrams")
class BigramOptions:
    """Options of data.corpus=bigrams."""

    symbols: int = key(16, "S", lambda x: None if 2 <= x <= len(LETTERS) else f"2 to {len(LETTERS)}")
    concentration: float = key(0.1, "of the Dirichlet distribution; small: each symbol has few successors", above(0))
    length: int = key(None, _LENGTH, at_least(1))


@section("data.needle")
class NeedleOptions:
    """Options of data.corpus=needle."""

    needles: int = key(4, "names with a code each, one of which is asked for", lambda x: _between(x, 1, 64))
    digits: int = key(4, "of a code, which are predicted", lambda x: _between(x, 1, 9))
    length: int = key(None, _LENGTH, at_least(1))


def _between(x: int, low: int, high: int) -> str | None:
    return None if low <= x <= high else f"{low} to {high}"


@section("data.listops")
class ListOpsOptions:
    """Options of data.corpus=listops."""

    longer_than: int = key(500, "symbols", at_least(1))
    shorter_than: int = key(2000, "symbols; 4 more than the other bound, or further", at_least(5))
    depth: int = key(10, "of a tree; its root has 1", lambda x: _between(x, 2, 64))
    arguments: int = key(10, "of an operation at most; it has 2 or more", at_least(2))
    train: int = key(96_000, "rows of the training split", at_least(1))
    test: int = key(2000, "rows of the validation split, and of the test split", at_least(1))

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        largest = _symbols_of_the_largest(self.depth, self.arguments)
        if self.longer_than + 3 < self.shorter_than and self.longer_than < largest:
            return []
        return [
            f"no tree has more than data.listops.longer_than={self.longer_than} and fewer than "
            f"data.listops.shorter_than={self.shorter_than} symbols: a tree has up to {largest}"
        ]


@section("data.copy")
class CopyOptions:
    """Options of data.corpus=copy."""

    reverse: bool = key(False, "the second word is the first one backwards")


def _symbols_of_the_largest(depth: int, arguments: int) -> int:
    nodes = [arguments**level for level in range(depth)]
    return nodes[-1] + 2 * sum(nodes[:-1])


def _copying(config: DataConfig, own: Any, options: CopyOptions) -> Any:
    from flash_lm.data.copying import copying  # noqa: PLC0415 (as all of these: slow to import)

    return copying(options.reverse)


def _mqar(config: DataConfig, own: Any, options: MQAROptions) -> Any:
    from flash_lm.data.mqar import mqar  # noqa: PLC0415

    return mqar(options)


def _listops(config: DataConfig, own: Any, options: ListOpsOptions) -> Any:
    from flash_lm.data.listops import listops  # noqa: PLC0415

    return listops(options)


def _bigrams(config: DataConfig, own: Any, options: BigramOptions) -> Any:
    from flash_lm.data.bigrams import bigrams  # noqa: PLC0415

    return bigrams(options)


def _needle(config: DataConfig, own: Any, options: NeedleOptions) -> Any:
    from flash_lm.data.needle import needle  # noqa: PLC0415

    return needle(config, options)


def _made(load: Any, *sections: type, labelled: bool = False) -> CorpusKind:
    has_labels = lambda config: labelled
    return CorpusKind(load, examples=True, answers=None, reads_path=False, labelled=has_labels, sections=sections)


register_corpus("copy", _made(_copying, CopyOptions))
register_corpus("mqar", _made(_mqar, MQAROptions))
register_corpus("bigrams", _made(_bigrams, BigramOptions))
register_corpus("needle", CorpusKind(_needle, examples=True, answers=None, sections=(NeedleOptions,)))
register_corpus("listops", _made(_listops, ListOpsOptions, labelled=True))
