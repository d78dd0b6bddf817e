"""A command prints its help and errors in its flags before it imports anything slow or restarts."""

import os
import subprocess
import sys

import pytest
from small import ROOT

from flash_lm.__main__ import COMMANDS, spelt
from flash_lm.config.registry import TASKS
from flash_lm.errors import InputError

SLOW = ("jax", "flax", "numpy", "optax", "orbax", "grain", "datasets", "pyarrow", "sentencepiece", "tokenizers")
SLOW += (
    "jinja2",
    "transformers",
    "huggingface_hub",
    "matplotlib",
    "tensorboardX",
    "fastapi",
    "uvicorn",
    "etils",
    "fsspec",
    "gcsfs",
)
# Runs a module like python -m; at the end it prints which slow modules were imported, and whether it restarted.
PROGRAM = """
import os, runpy, sys
name, slow, *words = sys.argv[1:]
sys.argv[1:] = words
def execv(*_): raise SystemExit("started again")
os.execv = execv
try:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
finally:
    print("IMPORTED", *sorted(set(slow.split(",")) & set(sys.modules)))
"""


def run_module(module: str, *words: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GLIBC_TUNABLES", "MALLOC_", "FLASH_LM_"))}
    argv = [sys.executable, "-c", PROGRAM, module, ",".join(SLOW), *words]
    done = subprocess.run(argv, cwd=ROOT, env=clean, capture_output=True, text=True)
    out, _, imported = done.stdout.rpartition("IMPORTED")
    assert imported == "\n", f"{module} {' '.join(words)} imports{imported}"
    return done.returncode, out, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_slow(name):
    code, out, err = run_module(f"flash_lm.{name}", "--help")
    assert (code, err) == (0, "") and out.startswith(f"usage: flash-lm {spelt(name)} ")
    if name in ("train", "import_model"):  # by the door, too
        assert run_module("flash_lm", name, "--help") == (code, out, err)


@pytest.mark.parametrize("name", ["train", "sweep"])
def test_help_lists_the_configs_and_their_presets(name):
    out = " ".join(run_module(f"flash_lm.{name}", "--help")[1].split())
    files = out.partition(" configs: ")[2].partition(" presets")[0]
    assert "ablations/attention_function, " in files and " quickstart, " in files and "base_110m" not in files
    named = out.partition("presets, as --config=base_110m:NAME: NAME is one of ")[2].partition(" presets")[0]
    assert {"adaptive_span", "mamba2", "flash_hybrid"} < set(named.split(", "))
    assert "presets, as --config=base_340m:NAME: NAME is one of transformer_plus_plus, flash, " in out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("demo", "keys", "recall")])
def test_missing_flags_import_nothing_slow(name):
    code, out, err = run_module(f"flash_lm.{name}")
    assert (code, out) == (2, "") and err.splitlines()[-1].startswith(f"flash-lm {spelt(name)}: error: ")


def test_the_package_imports_on_demand():
    program = "import sys, flash_lm; before = 'jax' in sys.modules; flash_lm.build_model; print(before, dir(flash_lm))"
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert out.startswith("False ") and "'register_family'" in out


@pytest.mark.parametrize(
    "first",
    [
        "flash_lm.config.registry",
        "flash_lm.families.aft",
        *(
            pytest.param(f"flash_lm.{x}", marks=pytest.mark.slow("starts one more process"))
            for x in ("data.tasks", "models.output_heads", "config.keys", "extend")
        ),
    ],
)
def test_all_rows_exist_whatever_is_imported_first(first):
    program = f"""
import {first}
from flash_lm.config.keys import SECTIONS, key, section
from flash_lm.config.registry import FAMILIES, TASKS

@section("model.mine")
class Mine:
    size: int = key(1, "mine")

print(list(TASKS), "flash" in FAMILIES, "model.chunks" in SECTIONS)
"""
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert out == "['causal_lm', 'masked_lm', 'prefix_lm', 'seq2seq', 'classify'] True True\n"


def test_a_missing_row():
    assert TASKS.get("masked") is None and "masked" not in TASKS
    with pytest.raises(InputError, match="task=masked must be one of causal_lm, masked_lm"):
        TASKS["masked"]
