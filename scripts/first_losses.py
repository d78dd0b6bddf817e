"""The losses of the first two steps of every family, to the last digit, to check that a code change keeps them.

    python scripts/first_losses.py --out=results/first_losses/after.jsonl
    python scripts/first_losses.py --checkout=../older --out=results/first_losses/before.jsonl

Of two layers of configs/tiny.py, causal and masked where a family has the form, each trained by the command of the
checkout.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

from flash_lm.cli.run import run
from flash_lm.config.registry import FAMILIES, TASKS
from flash_lm.errors import RunError, first_line
from flash_lm.families.family import with_form
from flash_lm.runs.jsonl import Line, read_jsonl, write_jsonl

_TASKS = ("causal_lm", "masked_lm")
_SMALL = {"model.num_layers": 2, "train.steps": 2, "train.log_every": 1, "train.eval_every": 0, "train.eval_steps": 1}


def first_losses(checkout: pathlib.Path, family: str, task: str) -> Line:
    """Losses of the training and, after it, of a batch of the validation split, in nats per token."""
    keys = _SMALL | {"model.family": family, "task": task, "train.checkpoint_every": 0}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "flash_lm.train", "--config=configs/tiny.py", f"--workdir={folder}/run"]
        words += [f"--config.{key}={value}" for key, value in keys.items()]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"{family}, {task}: {done.stderr.strip().splitlines()[-1]}")
        losses = [line["loss"] for line in read_jsonl(pathlib.Path(folder) / "run" / "metrics.jsonl")]
    return {"family": family, "task": task, "losses": losses}


def commit(checkout: pathlib.Path) -> str:
    """The commit of the checkout."""
    words = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RunError(first_line(RuntimeError(done.stderr)))
    return done.stdout.strip()


def main(argv: list[str]) -> None:
    """Writes one line per family and task."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--checkout", type=pathlib.Path, default=pathlib.Path.cwd(), help="a checkout of any version")
    parser.add_argument("--families", default=" ".join(FAMILIES), help="separated by spaces")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments = parser.parse_args(argv)
    checkout = arguments.checkout.resolve()
    about = {"git": commit(checkout)}
    families = arguments.families.split()
    cells = [(family, task) for task in _TASKS for family in families if family in with_form(TASKS[task].causal)]
    lines = [first_losses(checkout, *cell) | about for cell in cells]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.out, lines)
    print(f"{len(lines)} lines in {arguments.out}")


if __name__ == "__main__":
    run(main)
