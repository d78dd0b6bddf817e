"""Compares finished runs.

python scripts/compare.py runs/demo/* --out=runs/demo
"""

import argparse
import pathlib

from flash_lm.analysis.comparison import write_comparison
from flash_lm.command import run
from flash_lm.errors import InputError


def main(argv: list[str]) -> None:
    """Writes table.md and curves.png with their figures, results.jsonl and validation.jsonl, and prints the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("workdirs", nargs="+", metavar="RUN[@best|@STEP]", help="evaluated runs")
    parser.add_argument("--split", default="test", help="split of the table (default: test)")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the files")
    arguments = parser.parse_args(argv)
    text = write_comparison(arguments.workdirs, arguments.split, arguments.out)
    if text is None:
        names = ", ".join(arguments.workdirs)
        raise InputError(f"no run of {names} has results on {arguments.split}: evaluate one first")
    print(f"\n{text}\n\ncurves: {arguments.out / 'curves.png'}")


if __name__ == "__main__":
    run(main)
