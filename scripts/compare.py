"""Compares finished runs: a table of their results, the best first, and a plot of quality against steps and time.

python scripts/compare.py runs/demo/* --out=runs/demo
"""

import argparse
import pathlib
import sys

from flash_lm.analysis.curves import plot_curves
from flash_lm.analysis.results import newest_results, validation_curve, write_jsonl
from flash_lm.analysis.table import markdown_table


def main() -> None:
    """Writes table.md and curves.png with their figures, results.jsonl and validation.jsonl, and prints the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("workdirs", nargs="+", type=pathlib.Path, help="folders of evaluated runs")
    parser.add_argument("--split", default="test", help="split of the table (default: test)")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the files")
    arguments = parser.parse_args()
    workdirs = [path for path in arguments.workdirs if (path / "results.jsonl").exists()]
    results = newest_results(workdirs, arguments.split)
    if not results:
        sys.exit(
            f"no run of {', '.join(map(str, arguments.workdirs))} has results on {arguments.split}: evaluate one first"
        )
    results.sort(key=lambda line: line["bits_per_byte"])
    table = markdown_table(results)
    first = results[0]
    title = f"{first['corpus']}, {first.get('task', 'causal_lm')}, rows of {first['length']} tokens"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.md").write_text(f"{title}, {arguments.split} split\n\n{table}\n")
    write_jsonl(arguments.out / "results.jsonl", results)
    curves = {path.name: curve for path in workdirs if (curve := validation_curve(path))}
    write_jsonl(
        arguments.out / "validation.jsonl", [{"run": name, **line} for name, curve in curves.items() for line in curve]
    )
    plot_curves(curves, arguments.out / "curves.png", title)
    print(f"\n{title}, {arguments.split} split\n\n{table}\n\ncurves: {arguments.out / 'curves.png'}")


if __name__ == "__main__":
    main()
