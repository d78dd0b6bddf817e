"""Couplets, pairs of lines of equal length: the second is predicted from the first, character by character.

A row is <s> first <s> second. The pairs come from one parquet file a split, with columns `first` and `second`, or from
the two files `in.txt` and `out.txt`: one pair per line, characters with or without spaces between them. The files are
in the folder itself or in one folder per split.
"""

import collections
import hashlib
import itertools
import pathlib
import zlib
from collections.abc import Iterable

import numpy as np

from flash_lm.config.data import DataConfig
from flash_lm.data.corpora import CorpusKind, needs_path
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.tokenizer import CharacterTokenizer
from flash_lm.errors import InputError

Pair = tuple[str, str]

_FILES = ("in.txt", "out.txt")
_HELD_OUT = 50  # a missing split gets one pair in this many of the training split


class Couplets:
    """A split of couplets as examples."""

    def __init__(self, pairs: list[Pair], tokenizer: CharacterTokenizer):
        """Encodes each pair on access."""
        self._pairs, self._tokenizer = pairs, tokenizer
        self.longest = max(len(first) for first, _ in pairs) * 2 + 1

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self._pairs)

    def example(self, number: int, length: int) -> Example:
        """A pair; the row's length does not matter."""
        del length
        first, second = self._tokenizer.encode(self._pairs[number])
        return Example(np.concatenate([question(first, self._tokenizer), second]), prompt_length=len(first) + 2)


def question(first: np.ndarray, tokenizer: CharacterTokenizer) -> np.ndarray:
    """The ids before the second line: <s> first <s>; all but the last are the source of an encoder."""
    return np.concatenate([[tokenizer.begin], first, [tokenizer.begin]]).astype(np.int32)


def couplets(config: DataConfig, tokenizer: CharacterTokenizer | None = None) -> ExampleCorpus:
    """The pairs in the folder `data.path`; tokens are the characters of the training split, frequent ones first.

    With a tokenizer, its characters are used instead.

    A missing split is held out of the training split by the hash of a pair's first line, so that no first line is in
    both. Characters that the training split lacks all become one unknown token, which counts as a target.

    Raises:
        InputError: no such folder, no pairs in it, or invalid pairs.
    """
    folder = pathlib.Path(config.path).expanduser()
    splits = {name: pairs for name in SPLITS if (pairs := _read(folder, name)) is not None}
    if not splits.get("train"):
        raise InputError(
            f"data.path={config.path} has no couplets: give a folder with train.parquet (columns first and second), or "
            f"with {' and '.join(_FILES)}, in it or in its folder train/"
        )
    # Hold out missing splits by a hash of the first line.
    missing = [name for name in SPLITS if name not in splits]
    if missing:
        parts = [[pair for pair in splits["train"] if _bucket(pair) == i] for i in range(len(missing))]
        splits["train"] = [pair for pair in splits["train"] if _bucket(pair) >= len(missing)]
        splits |= dict(zip(missing, parts, strict=True))
    if empty := [name for name in SPLITS if not splits[name]]:
        raise InputError(f"data.path={config.path} leaves no couplet for {', '.join(empty)}: give more pairs")
    # The vocabulary comes from the training split; ties are broken by the character, so that ids are reproducible.
    if tokenizer is None:
        counts = collections.Counter(character for pair in splits["train"] for line in pair for character in line)
        tokenizer = CharacterTokenizer("".join(sorted(counts, key=lambda x: (-counts[x], x))))
    # The fingerprint covers the pairs of all splits, in order.
    lines = ([f"{name} {len(splits[name])}", *(line for pair in splits[name] for line in pair)] for name in SPLITS)
    digest = hashlib.sha256("\n".join(itertools.chain.from_iterable(lines)).encode())
    examples = {name: Couplets(splits[name], tokenizer) for name in SPLITS}
    return ExampleCorpus(folder.name, digest.hexdigest(), tokenizer, examples)


def _bucket(pair: Pair) -> int:
    return zlib.crc32(pair[0].encode()) % _HELD_OUT


def _read(folder: pathlib.Path, split: str) -> list[Pair] | None:
    """The pairs of a split; None if it has no files."""
    # A parquet file per split, or two text files with a line per couplet.
    parquet = folder / f"{split}.parquet"
    if parquet.exists():
        return _check_pairs(_parquet_pairs(parquet), str(parquet))
    for path in (folder / split, *([folder] if split == "train" else [])):
        if all((path / name).exists() for name in _FILES):
            lines = [_lines(path / name) for name in _FILES]
            if len(lines[0]) != len(lines[1]):
                listed = " and ".join(f"{name} {len(x)}" for name, x in zip(_FILES, lines, strict=True))
                raise InputError(f"the files of {path} must have as many lines as each other: {listed}")
            return _check_pairs(
                (("".join(a.split()), "".join(b.split())) for a, b in zip(*lines, strict=True)), str(path)
            )
    return None


def _parquet_pairs(path: pathlib.Path) -> Iterable[Pair]:
    import pyarrow  # noqa: PLC0415 (slow to import)
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        file = pq.ParquetFile(path)
        if missing := {"first", "second"} - set(file.schema_arrow.names):
            raise InputError(f"{path} has no column {' and '.join(sorted(missing))}: couplets need first and second")
        table = file.read(columns=["first", "second"])
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    # An empty cell is an empty line, which `_check_pairs` reports with its number.
    columns = [table[name].to_pylist() for name in ("first", "second")]
    if other := {type(text).__name__ for column in columns for text in column} - {"str", "NoneType"}:
        raise InputError(
            f"{path} has {' and '.join(sorted(other))} in its columns first and second: couplets must be text"
        )
    return zip(*([text or "" for text in column] for column in columns), strict=True)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}") from None


def _check_pairs(pairs: Iterable[Pair], where: str) -> list[Pair]:
    # A second line is as long as the first: the model relies on this when it decodes.
    checked = list(pairs)
    for number, (first, second) in enumerate(checked, start=1):
        if not first or len(first) != len(second):
            raise InputError(
                f"{where}: pair {number} has {len(first)} and {len(second)} characters: both must have "
                "the same number, one or more"
            )
    return checked


COUPLETS = CorpusKind(
    lambda config, known: couplets(config, known.tokenizer if known else None),
    examples=True,
    answers="couplets",
    problems=needs_path("a folder"),
)
