"""Times a training step of an older commit against that of this checkout, in turns: is any family slower?

    python -m benchmarks.steps.versions --before=COMMIT --families="flash mamba2" --out=runs/versions.jsonl

Each version runs in a process of its own, from a checkout of its own, on the same core, in float32. They step in turns,
so that what else runs on the machine slows both. One line per family, with the ratio of the fastest steps.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

from flash_lm.cli.run import run
from flash_lm.cli.types import positive, split_words
from flash_lm.timing.cell_lines import CellLines
from flash_lm.timing.machine import machine

ROOT = pathlib.Path(__file__).parents[2]
# It steps once for each line that it reads, and prints seconds by the clock and of the processor.
_WORKER = """
import sys, time
from flash_lm.timing.bare_step import BareStep, step_config
from flash_lm.configs import small
family, length, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
step = BareStep(step_config(small.get_config(), family, length, tokens_per_step=tokens, dtype="float32"))
step.start()
for _ in range(2):
    step.step()
print("ready", flush=True)
for _ in sys.stdin:
    clock, processor = time.perf_counter(), time.process_time()
    step.step()
    print(time.perf_counter() - clock, time.process_time() - processor, flush=True)
"""


def start(checkout: pathlib.Path, core: int, *arguments: str) -> subprocess.Popen[str]:
    """Starts a version's process on one core; it compiles until it is ready."""
    command = ["taskset", "--cpu-list", str(core), sys.executable, "-c", _WORKER, *arguments]
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, text=True)


def ask(process: subprocess.Popen[str]) -> float:
    """Seconds of the processor for one step."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a version's process ended")
    return float(line.split()[1])


def compare(checkouts: dict[str, pathlib.Path], core: int, rounds: int, *arguments: str) -> dict[str, float]:
    """Seconds of the fastest step of each version."""
    processes = {name: start(checkout, core, *arguments) for name, checkout in checkouts.items()}
    try:
        for name, process in processes.items():
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the process of {checkouts[name]} ended")
        turns = [{name: ask(process) for name, process in processes.items()} for _ in range(rounds)]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return {name: min(turn[name] for turn in turns) for name in processes}


def main(argv: list[str]) -> None:
    """Writes one JSON line per family to OUT."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps.versions", description=main.__doc__)
    parser.add_argument("--before", required=True, help="the older commit")
    parser.add_argument("--families", default="flash transformer_plus_plus", help="separated by spaces or commas")
    parser.add_argument("--length", type=positive, default=512)
    parser.add_argument("--tokens_per_step", type=positive, default=2048)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--core", type=int, default=0, help="number of the core that both versions run on")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments = parser.parse_args(argv)
    about, lines = machine(), CellLines(arguments.out, "family")
    older = ["git", "-C", str(ROOT), "rev-parse", "--short=12", arguments.before]
    commit = subprocess.run(older, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        before = pathlib.Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), arguments.before], check=True)
        try:
            for family in split_words(arguments.families):
                shape = family, str(arguments.length), str(arguments.tokens_per_step)
                seconds = compare({"before": before, "now": ROOT}, arguments.core, arguments.rounds, *shape)
                line = {
                    "family": family,
                    "before": commit,
                    "length": arguments.length,
                    "tokens_per_step": arguments.tokens_per_step,
                    "rounds": arguments.rounds,
                    "before_s": seconds["before"],
                    "now_s": seconds["now"],
                    "ratio": seconds["now"] / seconds["before"],
                }
                lines.put(line | about)
                print(f"{family}: {line['ratio']:.3f} of {line['before_s']:.2f} s", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)


if __name__ == "__main__":
    run(main)
