"""Judges the claims of the papers and of this project by the rules of claims.toml, and writes CLAIMS.md.

python -m flash_lm.sweep --config=studies/claims/configs/aft.py --split=test --workdir=runs/aft \
        --config.data.corpus=hf --config.data.path=$DATA/wikitext2
python -m studies.claims --study=aft --workdir=runs/aft    # adds the finished runs, and writes the page
python -m studies.claims                                # only the page, from the lines of results
"""

import argparse
import pathlib

from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import Line, read_lines, write_jsonl
from studies.claims.collect import collect, merge_lines
from studies.claims.page import CURVES, RESULTS, ROOT, RUNS, read_table, write_claims


def add_runs(study: str, runs: pathlib.Path, root: pathlib.Path) -> None:
    """Adds the finished runs of a study to its files."""
    known = read_table()[0]["studies"]
    if study not in known:
        raise InputError(f"--study={study} must be one of {', '.join(known)}")
    folder = root / RESULTS / study
    collected: list[list[Line]] = list(collect(runs))
    if not collected[0]:
        raise InputError(f"{runs} has no finished run: train some first with `{known[study]['command']}`")
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in zip((RUNS, CURVES), collected, strict=True):
        before = read_lines(folder / name)
        write_jsonl(folder / name, merge_lines(before, lines))


def main(argv: list[str]) -> None:
    """Writes CLAIMS.md and results/verdicts.jsonl."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--study", help="a study of claims.toml; its runs are added")
    parser.add_argument("--workdir", type=local_path, help="the folder of its sweep")
    parser.add_argument("--root", type=local_path, default=ROOT, help="root of the repository whose results are read")
    arguments = parser.parse_args(argv)
    if bool(arguments.study) != bool(arguments.workdir):
        raise InputError("--study and --runs go together: name the study of the folder's runs")
    if arguments.workdir:
        add_runs(arguments.study, arguments.workdir, arguments.root)
    print(write_claims(arguments.root))


if __name__ == "__main__":
    run(main)
