"""JAX's cache keeps compiled programs between commands, and does not change any number."""

import functools
import os
import platform
import subprocess
import sys
import time

import pytest
from small import command, finish, override_flags, small_config, write_corpus

from flash_lm.cli.compile_cache import FOLDER
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.metrics import TIMES


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A command that trains a new run with this home; returns the lines of its metrics, and its output."""
    folder = tmp_path_factory.mktemp("corpus")
    words = override_flags(small_config(write_corpus(folder / "text"), folder / "tokens"))
    words += ["--config=base", "--config.train.steps=4"]
    runs = iter(range(100))

    def run_command(home, *more: str, **environment: str):
        workdir = home / f"run_{next(runs)}"
        child = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        child |= {"HOME": str(home), "JAX_EXPLAIN_CACHE_MISSES": "1"} | environment
        out, err = finish(command("flash_lm.train", *words, f"--workdir={workdir}", *more, env=child))
        return read_jsonl(workdir / "metrics.jsonl"), out + err

    return run_command


def numbers(lines):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def entries(folder):
    return {path: path.read_bytes() for path in folder.rglob("*-cache")}


@pytest.mark.slow("starts four processes that train")
def test_a_second_run_compiles_nothing_and_has_the_same_numbers(train, tmp_path):
    # Which programs are worth keeping would otherwise depend on the load of the machine.
    train = functools.partial(train, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    first, said = train(tmp_path)
    assert "CACHE MISS for 'jit_step'" in said
    kept = entries(tmp_path / FOLDER.removeprefix("~/"))
    assert any("jit_step" in path.name for path in kept) and kept == entries(tmp_path)
    second, said = train(tmp_path)
    assert "CACHE MISS for 'jit_step'" not in said and entries(tmp_path) == kept
    assert numbers(second) == numbers(first)

    for path, content in kept.items():  # as after a full disk or a killed process
        path.write_bytes(content[: len(content) // 2])
    third, _ = train(tmp_path)
    assert numbers(third) == numbers(first)

    for path in kept:
        path.unlink()
    anew, _ = train(tmp_path, "--no_compile_cache")
    assert numbers(anew) == numbers(first) and not entries(tmp_path)


@pytest.mark.slow("starts a process that trains")
def test_a_folder_that_the_user_has_set_stays(train, tmp_path):
    train(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert entries(tmp_path / "mine") and entries(tmp_path) == entries(tmp_path / "mine")


@pytest.mark.slow("starts a process that trains")
def test_a_home_that_cannot_be_written_is_reported(train, tmp_path):
    _, said = train(tmp_path, HOME="/dev/null")
    assert "compiled programs are not cached: /dev/null/.cache/flash_lm/compiled: Not a directory" in said


@pytest.mark.slow("starts a process that trains")
def test_the_first_step_is_logged_once(train, tmp_path):
    """It is measured from the start of the process, and includes imports."""
    begun = time.monotonic()
    lines, said = train(tmp_path)
    took = time.monotonic() - begun
    (seconds,) = (line["first_step_s"] for line in lines if "first_step_s" in line)
    assert 0.5 < seconds < took and said.count(f"first step done {seconds:.1f} s after the start") == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names its features")
def test_the_features_of_the_processor_are_in_the_key():
    """Otherwise a folder on a shared disk could hold code that another processor cannot run."""
    program = """
import jax, numpy
from jax._src import cache_key
cache_key._hash_xla_flags = lambda *_: None  # of the key the flag itself is a part, too
cache_key._hash_serialized_compile_options = lambda *_, **__: None
lowered = jax.jit(lambda x: x + 1).lower(1.0)
devices = numpy.array(jax.devices())
print(cache_key.get(lowered.compiler_ir(), devices, None, devices[0].client))
"""
    keys = []
    for features in ("", "--xla_cpu_max_isa=SSE4_2", ""):
        environment = os.environ | {"XLA_FLAGS": features, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
        )
        keys.append(run.stdout)
    assert keys[0] == keys[2] != keys[1]
