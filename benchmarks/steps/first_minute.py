"""Measures the waits of the first minute: --help, and the first step of a first and a second run on a machine.

    python -m benchmarks.steps.first_minute --out=benchmarks/steps/results/first_minute.jsonl

Seconds from the start of the process, each the median of the rounds, in a new home directory. `first_run` starts with
an empty home: it trains the tokenizer, tokenises and compiles. `first_compilation` has the tokens, `second_run` also
the compiled programs.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax

from flash_lm.__main__ import COMMANDS
from flash_lm.cli.compile_cache import FOLDER
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.errors import RunError
from flash_lm.runs.jsonl import Line, append_jsonl, read_jsonl
from flash_lm.runs.provenance import provenance

_SHORT = ("--config.train.steps=2", "--config.train.warmup_steps=1", "--config.train.log_every=1")


def help_seconds(name: str, environment: dict[str, str]) -> float:
    """Returns the seconds until a command has printed its flags."""
    start = time.perf_counter()
    _run_command([f"flash_lm.{name}", "--help"], environment)
    return time.perf_counter() - start


def first_step_seconds(home: pathlib.Path, config: str, overrides: Sequence[str], environment: dict[str, str]) -> float:
    """Returns the seconds until a new run has done its first step, according to its log."""
    workdir = home / "run"
    words = [f"--config={config}", f"--workdir={workdir}", *_SHORT, "--config.train.eval_steps=1", *overrides]
    _run_command(["flash_lm.train", *words], environment | {"HOME": str(home)})
    (seconds,) = (line["first_step_s"] for line in read_jsonl(workdir / "metrics.jsonl") if "first_step_s" in line)
    shutil.rmtree(workdir)
    return seconds


def measure_first_steps(rounds: int, config: str, overrides: Sequence[str], environment: dict[str, str]) -> list[Line]:
    """Returns one line per case; each round has a new home folder."""
    cases: dict[str, list[float]] = {"first_run": [], "first_compilation": [], "second_run": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            home = pathlib.Path(folder)
            compiled = home / pathlib.PurePath(FOLDER).relative_to("~")
            for case, seconds in cases.items():
                if case == "first_compilation":
                    shutil.rmtree(compiled)
                seconds.append(first_step_seconds(home, config, overrides, environment))
    return [{"config": config, "until": "first step", "case": case} | _summarize(x) for case, x in cases.items()]


def _summarize(seconds: list[float]) -> Line:
    return {"seconds": statistics.median(seconds), "rounds_s": seconds}


def _run_command(words: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(words)} failed:\n{done.stderr}")


def main(argv: list[str]) -> None:
    """Appends JSON lines to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="quickstart", help="a config; --config.KEY=VALUE overrides one of its keys")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments, overrides = parser.parse_known_args(argv)
    chosen = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    environment = {name: value for name, value in user_environment().items() if name not in chosen}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), environment.get("PYTHONPATH")]))
    lines: list[Line] = []
    for name in COMMANDS:
        seconds = [help_seconds(name, environment) for _ in range(arguments.rounds)]
        lines.append({"command": name, "until": "--help"} | _summarize(seconds))
    lines += measure_first_steps(arguments.rounds, arguments.config, overrides, environment)
    append_jsonl(arguments.out, [line | provenance(jax.devices()[0].device_kind) for line in lines])
    for line in lines:
        what = line.get("command", line.get("case"))
        print(f"{what}: {line['seconds']:.2f} s until {line['until']}")


if __name__ == "__main__":
    run(main)
