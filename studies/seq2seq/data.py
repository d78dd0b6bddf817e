"""Filters couplets: keeps those whose characters are all frequent, for models trained on few couplets.

    python -m studies.seq2seq.data $DATA/couplets --out=runs/seq2seq/data

The characters are counted in the training split. Every split keeps only couplets without other characters.
"""

import argparse
import collections
import itertools
import pathlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.errors import InputError

_COLUMNS = ("first", "second")


def frequent_characters(couplets: pa.Table, most: int) -> set[str]:
    """Returns the `most` most frequent characters; among equals, those that come first in the table."""
    counts = collections.Counter(itertools.chain.from_iterable(_joined_texts(couplets)))
    return {character for character, _ in counts.most_common(most)}


def filter_couplets(couplets: pa.Table, characters: set[str]) -> pa.Table:
    """Returns the couplets that have no other characters."""
    return couplets.filter(pa.array([characters.issuperset(text) for text in _joined_texts(couplets)], pa.bool_()))


def _joined_texts(couplets: pa.Table) -> list[str]:
    return [first + second for first, second in zip(*(couplets[x].to_pylist() for x in _COLUMNS), strict=True)]


def main(argv: Sequence[str]) -> None:
    """Writes the filtered splits, and prints how many couplets each keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=pathlib.Path, help="folder with train.parquet, and others, of first and second")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--characters", type=positive, default=2000, help="how many are frequent; default: %(default)s")
    arguments = parser.parse_args(argv)
    splits = {path.name: pq.read_table(path) for path in sorted(arguments.corpus.glob("*.parquet"))}
    if "train.parquet" not in splits or not all(set(_COLUMNS) <= set(x.column_names) for x in splits.values()):
        raise InputError(f"{arguments.corpus} has no couplets: expected train.parquet with columns first and second")
    characters = frequent_characters(splits["train.parquet"], arguments.characters)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, couplets in splits.items():
        kept = filter_couplets(couplets, characters)
        pq.write_table(kept, arguments.out / name)
        print(f"{name}: {len(kept)} of {len(couplets)} couplets")


if __name__ == "__main__":
    run(main)
