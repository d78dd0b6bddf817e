"""Copies a corpus of images or texts with fewer test examples, so that a sweep over many runs can score them.

python -m studies.lra.data $DATA/mnist --out=runs/lra/data/image
python -m studies.lra.data runs/transfer/data/labelled --out=runs/lra/data/text

The test examples are evenly spread over those of the corpus. The other splits are copied unchanged.
"""

import argparse
import gzip
import pathlib
import shutil
import struct
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq

from flash_lm.cli.run import run
from flash_lm.errors import InputError

_IDX_MAGIC = 8  # the third byte of an idx file of unsigned bytes; the fourth is the number of dimensions


def evenly_spaced(count: int, wanted: int) -> np.ndarray:
    """Returns indices of `wanted` items, evenly spread over `count`.

    >>> evenly_spaced(9, 3).tolist()
    [0, 4, 8]
    """
    return np.linspace(0, count - 1, min(count, wanted)).astype(int)


def thin_idx(source: pathlib.Path, target: pathlib.Path, wanted: int) -> None:
    """Writes an idx file (LeCun's format of MNIST, gzipped) with fewer items."""
    raw = gzip.decompress(source.read_bytes())
    if raw[2] != _IDX_MAGIC:
        raise InputError(f"{source} is no idx file of bytes")
    dims = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    items = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(dims)
    kept = items[evenly_spaced(len(items), wanted)]
    target.write_bytes(gzip.compress(raw[:4] + struct.pack(f">{kept.ndim}I", *kept.shape) + kept.tobytes()))


def thin_parquet(source: pathlib.Path, target: pathlib.Path, wanted: int) -> None:
    """Writes a parquet file with fewer rows."""
    table = pq.read_table(source)
    pq.write_table(table.take(evenly_spaced(len(table), wanted)), target)


# By file suffix; the name of a test file starts with one of _TEST.
_THINNERS = {".gz": thin_idx, ".parquet": thin_parquet}
_TEST = ("t10k", "test")


def make(arguments: argparse.Namespace) -> None:
    """Copies every file of the corpus, those of the test split with fewer examples."""
    files = sorted(path for path in arguments.corpus.glob("*") if path.suffix in _THINNERS)
    tests = [path for path in files if path.name.startswith(_TEST)]
    if not tests:
        raise InputError(f"{arguments.corpus} has no test split: expected t10k-*.gz (MNIST) or test.parquet")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path in tests:
            _THINNERS[path.suffix](path, arguments.out / path.name, arguments.test)
        else:
            shutil.copyfile(path, arguments.out / path.name)


def main(argv: Sequence[str]) -> None:
    """Copies the corpus with fewer test examples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=pathlib.Path, help="folder with MNIST's idx files, or with parquet files")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--test", type=int, default=2000, help="most test examples")
    make(parser.parse_args(argv))


if __name__ == "__main__":
    run(main)
