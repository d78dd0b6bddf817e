"""Runs the parts that need a GPU, one after another, each within its time limit.

    python -m benchmarks.gpu --data=$DATA                # all parts, in 14 minutes; benchmarks/gpu/run.sh does the same
    python -m benchmarks.gpu steps decode --out=results  # two of them, in their 265 seconds
    REHEARSE=1 python -m benchmarks.gpu                  # at a hundredth of the size, on a CPU

A part's lines are written as its cells end. What a part leaves of its time goes to the later ones. A command that is
still running when its part's time is over is stopped, keeps the lines so far, and is named, as are those that had no
time to begin.
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

from benchmarks.gpu.parts import MOST, PARTS, SECONDS, Settings, Words
from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.errors import InputError, RunError

LEAST = 20  # seconds in which a command can do anything
ENDING = 15  # seconds that a command has to write its table after its last cell, and again to save when it is stopped


def main(argv: list[str]) -> None:
    """Runs parts of the measurements on a GPU, in the order in which they are listed."""
    arguments = flags().parse_args(argv)
    rehearse = arguments.rehearse or bool(os.environ.get("REHEARSE"))
    environment = _environment(rehearse)
    if not rehearse:
        _check_gpu(environment)
    default = "runs/gpu/rehearsal" if rehearse else "benchmarks/gpu/results"
    settings = Settings(arguments.out or pathlib.Path(default), arguments.data, arguments.python, rehearse)
    names, failed, now = arguments.parts or list(PARTS), [], time.monotonic()
    needed = sum(PARTS[name].seconds for name in names)
    end = now + (arguments.seconds or needed)
    # If there is more time than the parts need, the first of them may take it, and leave it to the others.
    due = max(now, end - needed)
    for name in names:
        due += PARTS[name].seconds
        failed += run_part(name, settings, min(end, due, time.monotonic() + MOST), environment)
    if failed:
        raise RunError("\n".join(failed))


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    listed = "; ".join(f"{name}: {part.what}, {part.seconds} s" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=main.__doc__, epilog=listed)
    parser.add_argument("parts", nargs="*", metavar="PART", type=_part, help="default: all")
    parser.add_argument("--data", type=pathlib.Path, help="folder with books/ and more; default: Python's own sources")
    parser.add_argument("--out", type=pathlib.Path, help="folder to write; default: benchmarks/gpu/results")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the peers")
    parser.add_argument("--seconds", type=positive, help="of all parts together; default: the sum of theirs")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU at a hundredth of the size; also REHEARSE=1")
    return parser


def run_part(name: str, settings: Settings, end: float, environment: dict[str, str]) -> list[str]:
    """Runs the commands of a part until the monotonic clock is at `end`; returns a sentence per command that failed."""
    failed, start = [], time.monotonic()
    if missing := PARTS[name].missing(settings, _is_installed):
        print(f"{name} is skipped: this Python has no {', '.join(missing)}", flush=True)
        return []
    for words in PARTS[name].commands(settings):
        left = end - time.monotonic()
        if left < LEAST:
            print(f"{name}: no time is left for python -m {shlex.join(words)}", flush=True)
            continue
        said = _run_command(words, left, environment)
        failed += [f"{name}: {said}"] if said else []
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return failed


def _run_command(words: Words, left: float, environment: dict[str, str]) -> str | None:
    """Runs a command for at most `left` seconds; returns why it failed, if it did."""
    of_cells = str(max(1, int(left - ENDING)))
    command = [sys.executable, "-m", *(word.replace(SECONDS, of_cells) for word in words)]
    print(f"$ python -m {shlex.join(command[2:])}", flush=True)
    # A session of its own, so that the processes which it starts are stopped with it.
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            print(f"stopped after {left:.0f} s, its lines so far are kept: python -m {shlex.join(words)}", flush=True)
            _stop(process)
            return None
        except BaseException:
            _stop(process)
            raise
    return f"python -m {shlex.join(words)} ended with code {code}" if code else None


def _stop(process: subprocess.Popen) -> None:
    """Stops a command and what it has started: a training run saves first, if it has the time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)


def _environment(rehearse: bool) -> dict[str, str]:
    """The environment of the commands: memory for two processes on a GPU, and no network."""
    defaults = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return defaults | os.environ | ({"JAX_PLATFORMS": "cpu"} if rehearse else {})


def _check_gpu(environment: dict[str, str]) -> None:
    """Checks in another process that JAX runs on a GPU: this one must not take its memory."""
    program = "import jax; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if done.stdout.strip() != "gpu":
        ended = [f"python ended with code {done.returncode}", *done.stderr.strip().splitlines()][-1]
        found = ended if done.returncode else f"jax runs on a {done.stdout.strip()}"
        raise InputError(f"no GPU, {found}: run make setup DEVICE=cuda, or set REHEARSE=1 to try the commands")


def _is_installed(module: str) -> bool:
    """Whether a module can be imported; its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _part(word: str) -> str:
    if word not in PARTS:
        raise argparse.ArgumentTypeError(f"{word} must be among {', '.join(PARTS)}")
    return word


if __name__ == "__main__":
    run(main, flags)
