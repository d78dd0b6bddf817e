"""flash-lm positions runs/positions.jsonl --out=runs/positions: what evaluate --carry has written, in a plot."""

import argparse

from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.errors import InputError
from flash_lm.report.figure import can_draw


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm positions", description=main.__doc__)
    parser.add_argument("file", type=local_path, help="result lines of evaluate --carry")
    parser.add_argument("--out", required=True, type=local_path, help="folder for the files")
    return parser


def main(argv: list[str]) -> None:
    """Shows perplexity by position in the document: spans.jsonl (a line for each run and span), a table and a plot."""
    arguments = flags().parse_args(argv)
    from flash_lm.report.by_position import plot_by_position, position_table
    from flash_lm.runs.jsonl import read_jsonl, write_jsonl

    if not arguments.file.exists():
        raise InputError(f"no file {arguments.file}: write one with flash-lm evaluate RUN --carry --results=…")
    lines = [line for line in read_jsonl(arguments.file) if "by_position" in line]
    if not lines:
        raise InputError(f"{arguments.file} has no scores by position: evaluate runs with --carry")
    arguments.out.mkdir(parents=True, exist_ok=True)
    spans = [{"run": line["run"], "family": line["family"], **span} for line in lines for span in line["by_position"]]
    write_jsonl(arguments.out / "spans.jsonl", spans)
    text = position_table(lines)
    (arguments.out / "table.md").write_text(f"{text}\n")
    if can_draw():
        plot_by_position(lines, arguments.out / "positions.png")
    print(text)


if __name__ == "__main__":
    run(main, flags)
