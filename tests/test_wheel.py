"""The installed package, and the commands under their installed names."""

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from flash_lm.cli.load import load_config, load_module
from flash_lm.errors import InputError

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow("builds the package")
def test_the_wheel_contains_only_flash_lm(tmp_path):
    """Built from a copy, since setuptools writes next to its sources; configs are part of the package."""
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "results", "notebooks")
    at_top = {"runs"}  # flash_lm/runs is a folder of the package
    ignore = lambda folder, names: ignored(folder, names) | (at_top if pathlib.Path(folder) == ROOT else set())
    shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=ignore)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={tmp_path}", "./source"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flash_lm"}
    sources = {f"flash_lm/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.py")}
    sources |= {str(path.relative_to(ROOT)) for path in (ROOT / "flash_lm").rglob("*.py")}
    assert sources <= names and {"flash_lm/py.typed", "flash_lm/inference/service/page.html"} <= names
    (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "flash-lm = flash_lm.__main__:main" in zipfile.ZipFile(wheel).read(scripts).decode()


@pytest.mark.parametrize("name", ["quickstart", "configs/quickstart.py", "flash_base", "copy"])
def test_configs_are_found_by_name_and_by_path(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_config(name, []).model.family in ("flash", "linear_transformer")


def test_a_config_name_works_in_any_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_module("ablations/chunk_size").get_config
    (tmp_path / "quickstart").write_text("from flash_lm.configs import copy\nget_config = copy.get_config\n")
    with pytest.raises(InputError, match="is not a Python file"):  # an existing file has precedence
        load_config("quickstart", [])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quikstart", "no config quikstart: did you mean quickstart"),
        ("configs/quikstart.py", "did you mean quickstart"),
        ("nothing_like_it_at_all", "give a file, or one of ablations/attention_function, "),
    ],
)
def test_a_missing_config(name, message):
    with pytest.raises(InputError, match=message):
        load_config(name, [])


def test_all_commands_have_a_second_name(tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "flash_lm", *words], cwd=ROOT, capture_output=True, text=True)

    bare = run()
    assert bare.returncode == 2 and "train" in bare.stderr and "serve" in bare.stderr
    assert run("trian").returncode == 2 and run("--help").returncode == 0
    done = run("evaluate", f"--workdir={tmp_path / 'none'}")
    assert done.returncode == 2 and "holds no run" in done.stderr
