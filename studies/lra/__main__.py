"""Stand-ins of Long Range Arena: the table and the picture of finished sweeps, with our and the published figures.

    python -m flash_lm.sweep --config=studies/lra/configs/listops_short.py --split=test --workdir=runs/lra/listops
    python -m studies.lra.data $DATA/mnist --out=runs/lra/data/image
    python -m flash_lm.sweep --config=studies/lra/configs/image_short.py --config.data.path=runs/lra/data/image \
        --split=test --workdir=runs/lra/image
    python -m studies.lra.data runs/transfer/data/labelled --out=runs/lra/data/text
    python -m flash_lm.sweep --config=studies/lra/configs/text_short.py --config.data.path=runs/lra/data/text \
        --split=test --workdir=runs/lra/text
    python -m studies.lra --workdir=runs/lra --out=studies/lra/results

OUT gets runs.jsonl (a line per classifier), table.md and lra.png. Lines of OUT are kept if their sweep is not in the
folder of runs, so the sweeps can be made one after another.
"""

import argparse

from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.errors import InputError
from flash_lm.report.figure import can_draw
from flash_lm.runs.jsonl import read_lines, write_jsonl
from studies.lra import models, published
from studies.lra.report import lra_table, plot_lra, read_sweep_lines


def main(argv: list[str]) -> None:
    """Writes runs.jsonl, table.md and lra.png from the folders of sweeps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--workdir", required=True, type=local_path, help="folder with a sweep per task, named as the task"
    )
    parser.add_argument("--out", required=True, type=local_path, help="folder for the results")
    arguments = parser.parse_args(argv)
    # Sweeps that are here replace the lines of their task; the others are kept.
    kept, lines = read_lines(arguments.out / "runs.jsonl"), []
    for task in published.TASKS:
        kept_lines = [line for line in kept if line["lra"] == task]
        lines += read_sweep_lines(arguments.workdir / task, task) if (arguments.workdir / task).is_dir() else kept_lines
    if not lines:
        raise InputError(
            f"--workdir={arguments.workdir} has no scored sweep: make one with --workdir={arguments.workdir}/"
            f"{published.TASKS[0]}, and --split=test"
        )
    # Lines, table and picture.
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.out / "runs.jsonl", lines)
    text = lra_table(lines, models.FAMILIES, published.ACCURACY, published.TASKS)
    text = f"Test accuracy in %. {published.NOTE}\n\n{text}"
    (arguments.out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_lra(lines, models.FAMILIES, published.TASKS, arguments.out / "lra.png")
    print(text)


if __name__ == "__main__":
    run(main)
