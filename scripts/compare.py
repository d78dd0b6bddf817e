"""Compares finished runs.

    python scripts/compare.py runs/demo/* --out=runs/demo
    python scripts/compare.py runs/demo/* --out=runs/demo --prompt="def main("

OUT gets table.md and curves.png with their figures, results.jsonl and validation.jsonl; and index.html, one page that
has all of it, with what differs in the runs' configs, and opens without a network. With --prompt it also has how each
run continues this text.
"""

import argparse
from collections.abc import Sequence

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.config.experiment import fill_open_keys
from flash_lm.errors import InputError
from flash_lm.report.comparison import write_comparison
from flash_lm.report.page import write_page
from flash_lm.report.results import labels
from flash_lm.runs.run_folder import RunFolder


def main(argv: list[str]) -> None:
    """Writes table.md, curves.png and their figures, and a page with all of it; prints the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("workdirs", nargs="+", metavar="RUN[@best|@STEP]", help="evaluated runs")
    parser.add_argument("--split", default="test", help="split of the table (default: test)")
    parser.add_argument("--out", required=True, type=local_path, help="folder for the files")
    parser.add_argument("--prompt", default="", help="a text for each run to continue, on the page")
    add_plugins_flag(parser)
    arguments = parser.parse_args(argv)
    use_plugins(arguments)
    out = arguments.out
    # The table and the curves.
    text = write_comparison(arguments.workdirs, arguments.split, out)
    if text is None:
        names = ", ".join(arguments.workdirs)
        raise InputError(f"no run of {names} has results on {arguments.split}: evaluate one first")
    # The page: also configs and continuations.
    samples = _samples(arguments.workdirs, arguments.prompt) if arguments.prompt else {}
    pictures = [path for path in (out / "curves.png", out / "accuracy.png") if path.exists()]
    title = f"{len(arguments.workdirs)} runs on the {arguments.split} split"
    names = labels(arguments.workdirs)
    configs = {label: fill_open_keys(RunFolder(name.workdir).config.to_dict()) for label, name in names.items()}
    write_page(out / "index.html", title, text, pictures, configs, samples, arguments.prompt)
    print(f"\n{text}\n\ncurves: {out / 'curves.png'}\npage: {out / 'index.html'}")


def _samples(runs: Sequence[str], prompt: str) -> dict[str, str]:
    """How each run continues a text, or why it cannot."""
    import flash_lm  # noqa: PLC0415 (it loads JAX, which only samples need)

    continuations = {}
    for label, name in labels(runs).items():
        try:
            continuations[label] = flash_lm.load(str(name)).generate(prompt, 100)
        except InputError as error:
            continuations[label] = f"none: {error}"
    return continuations


if __name__ == "__main__":
    run(main)
