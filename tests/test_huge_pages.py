"""Commands use huge pages for their arrays, unless the user has configured glibc's allocator."""

import os
import pathlib
import platform
import subprocess
import sys

import pytest

THP = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import os, sys
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.run import run

def main(argv):
    array = bytearray(b"x") * 2**28
    pages = [line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")]
    print(os.getpid(), argv, os.environ.get("GLIBC_TUNABLES"), user_environment().get("GLIBC_TUNABLES"), *pages)

run(main)
"""


def run_program(path: pathlib.Path, **environment: str) -> list[str]:
    """The output of the program, run from a file with arguments; its process keeps the id of its start."""
    path.write_text(PROGRAM)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GLIBC_TUNABLES", "MALLOC_", "FLASH_LM_"))}
    process = subprocess.Popen([sys.executable, path, "a b", "--c"], env=clean | environment, stdout=subprocess.PIPE)
    out, _ = process.communicate()
    number, rest = out.decode().split(maxsplit=1)
    assert process.returncode == 0
    assert int(number) == process.pid
    assert rest.startswith("['a b', '--c'] ")
    return rest.removeprefix("['a b', '--c'] ").split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other settings")
@pytest.mark.skipif(not THP.is_file() or "[madvise]" not in THP.read_text(), reason="the system decides on huge pages")
def test_arrays_lie_on_huge_pages(tmp_path):
    tunables, user_tunables, _, kilobytes, _ = run_program(tmp_path / "program.py")
    assert tunables == "glibc.malloc.hugetlb=1"
    assert user_tunables == "None"
    assert int(kilobytes) > 200_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_settings_of_the_user_stay(tmp_path):
    tunables, user_tunables, *_ = run_program(tmp_path / "a.py", GLIBC_TUNABLES="glibc.malloc.mmap_threshold=1000000")
    assert tunables == user_tunables == "glibc.malloc.mmap_threshold=1000000"
    tunables, *_ = run_program(tmp_path / "b.py", MALLOC_ARENA_MAX="1")
    assert tunables == "None"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other settings")
@pytest.mark.skipif(not THP.is_file() or "[madvise]" not in THP.read_text(), reason="the system decides on huge pages")
@pytest.mark.parametrize(
    ("before", "watcher"),
    [
        ("sys.settrace(lambda *_: None)", "a debugger (sys.settrace)"),
        ("import cProfile; cProfile.Profile().enable()", "cProfile" if hasattr(sys, "monitoring") else "a profiler"),
        ("import pdb", "pdb"),  # like python -m pdb, also if it continues
        ("sys.modules['debugpy'] = sys", "debugpy"),
    ],
)
def test_a_process_under_a_debugger_does_not_restart(tmp_path, before, watcher):
    program = tmp_path / "program.py"
    program.write_text(f"import os, sys\nbegun = os.environ.copy()\n{before}\n{PROGRAM}\nassert os.environ == begun\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GLIBC_TUNABLES", "MALLOC_", "FLASH_LM_"))}
    done = subprocess.run([sys.executable, program], env=clean, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[2] == "None"
    (line,) = done.stderr.splitlines()
    assert line.startswith("not restarted with huge pages, because ") and line.endswith("steps on a CPU take longer")
    assert watcher in line
