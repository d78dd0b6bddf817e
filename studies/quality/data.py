"""Makes the corpora of the quality study: books, wiki and imdb, each with a small held-out text.

    python -m studies.quality.data $DATA --out=runs/study/data

The training text is longer than the longest run reads: the first books, articles, and reviews without a label. Runs are
scored many times, so the held-out text is short: the beginning of each held-out book, and the first articles and
reviews. Duplicate texts are taken once, and a held-out text is never trained on.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from flash_lm.cli.run import run
from flash_lm.errors import InputError

# corpus -> split -> its file, characters per document, and characters of the split; None: all
SPLITS: Mapping[str, Mapping[str, tuple[str, int | None, int | None]]] = {
    "books": {
        "validation": ("validation", 80_000, None),
        "test": ("test", 80_000, None),
        "train": ("train", None, 45_000_000),
    },
    "wiki": {
        "validation": ("validation", None, 600_000),
        "test": ("test", None, 1_500_000),
        "train": ("train", None, 45_000_000),
    },
    "imdb": {
        "validation": ("train", None, 300_000),
        "test": ("test", None, 1_000_000),
        "train": ("unlabelled", None, 22_000_000),
    },
}


def read_texts(file: pathlib.Path, each: int | None, total: int | None, seen: set[str]) -> Iterator[str]:
    """Yields the texts of a file that are not in `seen`, up to a number of characters, and adds them to `seen`.

    Args:
        file: a parquet file with a column `text`.
        each: most characters per text; None: all.
        total: most characters in all; None: all.
        seen: texts that are skipped.

    Raises:
        InputError: no such file, or it has no column `text`.
    """
    try:
        column = pq.read_table(file, columns=["text"])["text"]
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file} must be a parquet file with a column text: {str(error).splitlines()[0]}") from None
    read = 0
    for value in column:
        text = value.as_py()
        if text in seen:
            continue
        seen.add(text)
        yield text[:each]
        read += len(text[:each])
        if total is not None and read >= total:
            return


def main(argv: list[str]) -> None:
    """Writes OUT/CORPUS/SPLIT.jsonl, and prints the size of each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("data", type=pathlib.Path, help="the folder with books/, wiki/ and imdb/")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments = parser.parse_args(argv)
    for corpus, splits in SPLITS.items():
        seen: set[str] = set()
        for split, (name, each, total) in splits.items():
            documents = list(read_texts(arguments.data / corpus / f"{name}.parquet", each, total, seen))
            folder = arguments.out / corpus
            folder.mkdir(parents=True, exist_ok=True)
            # A parquet file would also say which library wrote it, so its hash would differ for the same text.
            lines = (json.dumps({"text": text}, ensure_ascii=False) for text in documents)
            (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            print(f"{corpus} {split}: {len(documents):,} texts, {sum(map(len, documents)):,} characters")


if __name__ == "__main__":
    run(main)
