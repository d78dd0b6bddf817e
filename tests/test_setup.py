"""`make setup`: a wrong Python or device is reported in one line; an environment of another Python is made again."""

import subprocess
import sys

import pytest
from small import ROOT


@pytest.fixture
def setup(tmp_path):
    old = tmp_path / "old"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[2])" "$@"\n'
    )
    old.chmod(0o755)

    def make(*words: str) -> tuple[int, str, list[str]]:
        command = ["make", "setup", f"VENV={tmp_path / 'venv'}", *(word.replace("OLD", str(old)) for word in words)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr.splitlines()

    yield make
    assert not (tmp_path / "venv").exists()


def test_another_python_is_named(setup):
    code, _, (line, _) = setup("PYTHON=OLD")
    assert code and line.startswith("error: ")
    assert line.endswith("old is Python 3.10, and 3.11 to 3.13 is needed: name one, as in make setup PYTHON=python3.12")


def test_another_device_is_refused(setup):
    code, _, (line,) = setup("DEVICE=gpu")
    assert code and "DEVICE=gpu must be cpu, cuda, cuda12 or tpu" in line


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda12", "tpu"])
def test_a_device_has_its_packages(setup, device):
    code, out, _ = setup("-n", f"DEVICE={device}")
    assert not code and f'-e ".[{device}]"' in out


@pytest.mark.parametrize("same", [True, False])
def test_an_environment_of_another_python_is_made_again(tmp_path, same):
    """Packages for one Python do not work with another; with the same Python, the user's packages stay."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").write_text("#!/bin/sh\necho Python " + ("3.12.1" if same else "3.10.13"))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.12.1\n[ "$1" = -m ] && echo "$@" && exit 1\nexit 0')
    for path in (tmp_path / "venv" / "bin" / "python", python):
        path.chmod(0o755)
    words = ["make", "setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}"]
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert f"\n-m venv{'' if same else ' --clear'} {tmp_path / 'venv'}\n" in out
