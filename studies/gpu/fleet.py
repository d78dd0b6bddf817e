"""Makes jobs left in the queue of the controls on a GPU: the rates and seeds of a model as one compiled program.

    python -m studies.gpu.fleet --data=$DATA --out=benchmarks/gpu/results/fleet
    python -m studies.gpu.fleet --list                 # the commands, in the order of the queue

A model's jobs left differ in rate and seed, so `python -m flash_lm.sweep --vmap` trains them together. All seeds are
trained at all rates, where the queue trains further seeds at the best rate alone: together they take little longer. Of
several budgets the full one is made. Lines are those of the sweep: README.md says why they are not the controls'.
"""

import argparse
import json
import math
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.config.changes import apply_changes
from flash_lm.errors import InputError, RunError
from flash_lm.runs.jsonl import Line, read_lines, write_jsonl
from flash_lm.runs.provenance import config_hash
from flash_lm.sweeps.jobs import RUNS, Job
from flash_lm.timing.machine import machine
from studies.controls import anchor, design, recall
from studies.quality import data as texts
from studies.quality.run import DECAY

TREE = pathlib.Path(__file__).parents[2]
TEXTS = pathlib.Path("runs/gpu/texts")
LEAST, SAVING = 30, 30  # seconds in which a fleet can do anything, and for it to save when it is stopped
_MEMBER = {"seed": 0, "train.learning_rate": 0.001}  # the keys in which the members of a fleet differ


class Fleet(NamedTuple):
    """Jobs left of one model.

    Attributes:
        name: part and model, as in the names of its jobs.
        config: the config of all members but for rate and seed.
        rates: learning rates of its jobs.
        seeds: seeds of its jobs.
        jobs: number of jobs left.
    """

    name: str
    config: Any
    rates: list[float]
    seeds: list[int]
    jobs: int

    def command(self, runs: pathlib.Path) -> list[str]:
        """Returns the words after `python -m` that train and score its members."""
        grid = {"train.learning_rate": self.rates, "seed": self.seeds}
        words = [f"--grid={key}={','.join(f'{value:g}' for value in values)}" for key, values in grid.items()]
        config = f"--config=studies/gpu/fleet_config.py:{self.name}"
        return ["flash_lm.sweep", config, *words, "--vmap", "--split=test", f"--workdir={runs / self.name}"]

    def missing_texts(self) -> list[str]:
        """Returns the folders of text that it reads and this machine does not have; none where sequences are drawn."""
        of_data = self.config.data
        folders = [of_data.path, *(folder for folder, _ in of_data.mixture or ())]
        return [folder for folder in folders if folder and not (TREE / folder).exists()]


def left_fleets(root: pathlib.Path = TREE) -> list[Fleet]:
    """Returns the fleets of the jobs that have no lines in a tree, in the order of the queue."""
    controls, quality = design.folders(root)
    jobs = design.jobs_now(design.Data(TEXTS), design.read_counted_lines(controls, quality))
    left = [job for job in jobs if not (controls / RUNS / f"{job.name}.jsonl").exists()]
    groups: dict[str, list[Job]] = {}
    for job in left:
        groups.setdefault(config_hash(apply_changes(job.config, _MEMBER).to_dict()), []).append(job)
    return [_fleet(group) for group in groups.values()]


def _fleet(jobs: Sequence[Job]) -> Fleet:
    part, model = (jobs[0].about[key] for key in ("part", "run"))
    config = apply_changes(jobs[0].config, _full_budget(jobs[0]) | _MEMBER)
    rates = sorted({job.config.train.learning_rate for job in jobs})
    return Fleet(
        f"{part}_{model}".replace("/", "_"), config, rates, sorted({job.about["seed"] for job in jobs}), len(jobs)
    )


def _full_budget(job: Job) -> dict[str, Any]:
    """Returns the schedule that a trunk's last decay has, as a run from its first step, to the bit."""
    if job.about["part"] in (anchor.PART, recall.PART):
        return {}  # these have a schedule of their own
    return {"train.schedule": "sqrt", "train.decay_steps": job.config.train.steps // DECAY}


def prepare_texts(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the texts of the studies whose sources a folder has: a machine may have a part of them.

    Args:
        source: folder with books/, wiki/ and imdb/, or shakespeare/input.txt, or all.
        folder: folder to write; what it has stays.
    """
    makers = {
        "study": lambda path: texts.main([str(source), f"--out={path}"]),
        "shakespeare": lambda path: anchor.write_text(source / "shakespeare" / "input.txt", path),
    }
    for name, make in makers.items():
        # In one piece, so that a folder which exists is complete.
        partial = folder / f"{name}.{os.getpid()}"
        try:
            if not (folder / name).exists():
                make(partial)
                os.replace(partial, folder / name)
        except InputError as error:
            print(f"no texts of {name}: {error}", flush=True)
            shutil.rmtree(partial, ignore_errors=True)


def make_fleet(words: Sequence[str], seconds: float) -> int | None:
    """Runs a sweep for at most so many seconds; returns its exit code, or None if it was stopped, and has saved."""
    with subprocess.Popen([sys.executable, "-m", *words], cwd=TREE) as process:
        try:
            return process.wait(None if seconds == math.inf else seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(SAVING)
            except subprocess.TimeoutExpired:
                process.kill()
            return None


def collect(fleet: Fleet, folder: pathlib.Path) -> list[Line]:
    """Returns the lines of the members that are scored, with their rate and seed."""
    lines = []
    for file in sorted(folder.glob("*/results.jsonl")):
        config = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
        about = {"fleet": fleet.name, "rate": config["train"]["learning_rate"], "seed": config["seed"]}
        lines += [line | about for line in read_lines(file)]
    return lines


def main(argv: list[str]) -> None:
    """Makes the fleets of the jobs left, and adds the lines of each to fleet.jsonl in OUT when it ends."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=pathlib.Path, help="folder of the corpora, or of a part of them; default: none")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/gpu/fleet"), help="runs in progress")
    parser.add_argument("--seconds", type=positive, help="after which it saves and ends")
    parser.add_argument("--list", action="store_true", help="print the commands and make nothing")
    parser.add_argument("--rehearse", action="store_true", help="one fleet, of few steps")
    parser.add_argument("--out", type=pathlib.Path, help="folder to write")
    arguments = parser.parse_args(argv)
    fleets = left_fleets()
    if arguments.list:
        for fleet in fleets:
            print(f"# {fleet.jobs} jobs\npython -m {shlex.join(fleet.command(arguments.workdir))}")
        return
    if arguments.out is None:
        parser.error("--out is needed")
    end, about, failed = time.monotonic() + (arguments.seconds or math.inf), machine(), []
    file = arguments.out / "fleet.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if arguments.data:
        prepare_texts(arguments.data, TREE / TEXTS)
    if without := [fleet.name for fleet in fleets if fleet.missing_texts()]:
        print(f"{len(without)} fleets are left out, since their texts are not here: {', '.join(without)}", flush=True)
    fleets = [fleet for fleet in fleets if not fleet.missing_texts()]
    more = ["--config.train.steps=6", "--config.train.checkpoint_every=0"] if arguments.rehearse else []
    for number, fleet in enumerate(fleets[:1] if arguments.rehearse else fleets):
        left = end - time.monotonic()
        code = make_fleet([*fleet.command(arguments.workdir), *more], left - SAVING) if left > LEAST + SAVING else None
        # A fleet that was stopped before has lines of some members.
        others = [line for line in read_lines(file) if line["fleet"] != fleet.name]
        write_jsonl(file, [*others, *(line | about for line in collect(fleet, arguments.workdir / fleet.name))])
        if code is None:
            names = ", ".join(x.name for x in fleets[number:])
            print(f"no time is left for {names}: the same command goes on from there", flush=True)
            break
        failed += [f"{fleet.name} ended with code {code}"] if code else []
    if failed:
        raise RunError("\n".join(failed))


if __name__ == "__main__":
    run(main)
