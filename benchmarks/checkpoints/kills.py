"""Kills a run with SIGKILL at random moments, half of them while it saves; compares it with an uninterrupted run.

    python -m benchmarks.checkpoints.kills --kills=20 --families="flash aft_local" --out=benchmarks/checkpoints/results

After the last kill the run continues to its end. Losses, final parameters and the optimizer's state must equal those of
the uninterrupted run, to the bit. Dropout is on, so the order of data and the randomness must be the same, too.
"""

import argparse
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import positive, split_words
from flash_lm.config.experiment import parse
from flash_lm.errors import RunError
from flash_lm.runs.jsonl import Line, append_jsonl, read_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import run_name
from flash_lm.training import checkpoint_read
from flash_lm.training.metrics import TIMES
from flash_lm.training.setup import build_experiment

SETTINGS = ("model.dropout=0.1", "train.steps=200", "train.warmup_steps=5", "train.log_every=1", "train.eval_every=20")
SAVES = ("train.checkpoint_every=3", "train.eval_steps=1")
POLL = 0.005  # seconds
LONGEST_SAVE = 0.1  # seconds, about


class Run:
    """A run of `flash_lm.train` in separate processes."""

    def __init__(self, command: list[str], workdir: pathlib.Path):
        """`command`: the command without the folder."""
        self.command, self.workdir = [*command, f"--workdir={workdir}"], workdir
        self.errors = workdir.with_suffix(".err")

    def start(self) -> subprocess.Popen:
        """Starts a process that trains, or resumes training."""
        with open(self.errors, "w") as file:  # a pipe that is not read would block it
            return subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=file)

    def finish(self) -> float:
        """Trains to the end; returns the seconds.

        Raises:
            RunError: the process ended with an error.
        """
        start = time.perf_counter()
        self.check(self.start().wait())
        return time.perf_counter() - start

    def check(self, code: int) -> None:
        """Raises a RunError if a process has ended with an error."""
        if code:
            raise RunError(f"{' '.join(self.command)} ended with code {code}: {self.errors.read_text()[-2000:]}")

    def kill(self, after: float, steps: int, *, in_a_save: bool) -> Line | None:
        """Starts a process and kills it after `after` seconds or `steps` steps; returns a line; None: it finished.

        Both count from the start of the process or, with `in_a_save`, from its next save.
        """
        newest = max(checkpoint_read.checkpoint_steps(self.workdir), default=0)
        opened, start, process = self._metrics_file(), time.perf_counter(), self.start()
        next_step, begin = None, None if in_a_save else (0.0, 0)  # seconds until its first step; origin of the counts
        while process.poll() is None:
            now = time.perf_counter() - start
            done = 0 if self._metrics_file() == opened else self.last_step() - newest
            next_step = now if next_step is None and done > 0 else next_step
            saving = next_step is not None and any(checkpoint_read.checkpoint_folder(self.workdir).glob("*tmp*"))
            begin = (now, done) if saving and begin is None else begin
            if begin is not None and (now - begin[0] >= after or done - begin[1] >= steps):
                process.kill()
                process.wait()
                return {"killed_after_s": now, "saving": saving, "next_step_s": next_step}
            time.sleep(POLL)
        self.check(process.returncode)
        return None

    def _metrics_file(self) -> int | None:
        """Returns the inode of metrics.jsonl: a resumed run rewrites the file."""
        path = self.workdir / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def last_step(self) -> int:
        """Returns the last step in its metrics; a resumed run first cuts them at the newest checkpoint."""
        return max((line["step"] for line in read_jsonl(self.workdir / "metrics.jsonl")), default=0)

    def training_seconds(self) -> float:
        """Returns the training seconds of the run, without start, compilation, evaluation and saving."""
        return read_jsonl(self.workdir / "metrics.jsonl")[-1]["train_seconds"]

    def figures(self) -> list[Line]:
        """Returns the metric lines without the times."""
        lines = read_jsonl(self.workdir / "metrics.jsonl")
        return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]

    def state(self) -> list[np.ndarray]:
        """Returns the arrays of the newest checkpoint."""
        experiment = build_experiment(parse(RunFolder(self.workdir).config))
        return jax.device_get(jax.tree.leaves(checkpoint_read.restore(run_name(self.workdir), experiment.abstract)[0]))


def survive(command: list[str], folder: pathlib.Path, kills: int, draw: random.Random) -> tuple[list[Line], bool]:
    """Kills a run; returns one line per kill, and whether it ended like the uninterrupted run."""
    uninterrupted, killed_run = Run(command, folder / "uninterrupted"), Run(command, folder / "killed")
    uninterrupted.finish()  # fills the caches of the corpus
    timed_run = Run(command, folder / "timed")
    # At most a tenth of the training per kill, or it would end too soon. A limit in seconds is not enough: a shared
    # machine may be faster later.
    latest = timed_run.finish() - 0.9 * timed_run.training_seconds()
    most = max(1, timed_run.last_step() // (2 * kills))
    lines: list[Line] = []
    while len(lines) < kills:
        in_a_save = len(lines) % 2 == 1
        after, steps = (LONGEST_SAVE, most) if in_a_save else (latest, draw.randint(1, most))
        line = killed_run.kill(draw.uniform(0, after), steps, in_a_save=in_a_save)
        if line is None:
            raise RunError(f"the run ended after {len(lines)} kills: raise --config.train.steps")
        lines.append(line)
        print(f"kill {len(lines)} of {kills}: {line}", flush=True)
    killed_run.finish()
    same_state = all(np.array_equal(a, b) for a, b in zip(killed_run.state(), uninterrupted.state(), strict=True))
    return lines, same_state and killed_run.figures() == uninterrupted.figures()


def main(argv: list[str]) -> None:
    """Appends one line per kill and per family to kills.jsonl in OUT; exit code 1 if a run did not survive."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/tiny.py")
    parser.add_argument("--families", default="flash aft_local", help="separated by spaces or commas")
    parser.add_argument("--kills", type=positive, default=20)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the moments of the kills")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments, overrides = parser.parse_known_args(argv)
    # Check the config before any run starts.
    settings = [f"--config.{word}" for word in (*SETTINGS, *SAVES)] + overrides
    load_config(arguments.config, settings)  # reports errors at once
    draw, about = random.Random(arguments.seed), provenance(jax.devices()[0].device_kind)
    file, failed = arguments.out / "kills.jsonl", []
    file.unlink(missing_ok=True)
    # Kill a run of each family, and append its lines.
    for family in split_words(arguments.families):
        command = [sys.executable, "-m", "flash_lm.train", f"--config={arguments.config}", *settings]
        command.append(f"--config.model.family={family}")
        with tempfile.TemporaryDirectory() as folder:
            lines, equal = survive(command, pathlib.Path(folder), arguments.kills, draw)
        append_jsonl(file, [{"family": family} | line | about for line in lines])
        resume_seconds = [line["next_step_s"] for line in lines if line["next_step_s"] is not None]
        # The summary of a family follows its kills.
        summary = {
            "family": family,
            "kills": len(lines),
            "while_saving": sum(line["saving"] for line in lines),
            "equal": equal,
            "median_s_to_next_step": float(np.median(resume_seconds)),
        }
        append_jsonl(file, [summary | about])
        print(summary, flush=True)
        failed += [] if equal else [family]
    if failed:
        raise RunError(f"{', '.join(failed)}: killed and uninterrupted runs differ")


if __name__ == "__main__":
    run(main)
