"""The notebooks from their first cell to their last, with small settings."""

import ast
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
from small import load_script, override_flags, small_config, write_corpus

from flash_lm.cli.load import load_config
from flash_lm.config import keys
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = ROOT / "docs" / "pictures"
ADDRESS = "https://github.com/someone/something"
pytestmark = pytest.mark.usefixtures("usual_promotion")


def settings(tmp_path: pathlib.Path) -> dict:
    """Settings for the cells that are tagged as parameters."""
    corpus = write_corpus(tmp_path / "corpus")
    config = small_config(corpus, tmp_path / "cache")
    replaced = [f"--config.{key}=" for key in ("model.family", "data.corpus", "data.path", "train.steps")]
    overrides = [word for word in override_flags(config) if not word.startswith(tuple(replaced))]
    data = ["--config.data.corpus=text", f"--config.data.path={corpus}"]
    return {
        "quality_against_step_time": {
            "FAMILIES": ("transformer_plus_plus", "flash"),
            "CORPUS": corpus,
            "OVERRIDES": [*overrides, "--config.train.steps=12"],
        },
        "ablate_chunk_attention": {"STEPS": 12, "CHUNKS": (4,), "TOKENS": 8, "OVERRIDES": [*overrides, *data]},
        "add_a_family": {"STEPS": 12, "OVERRIDES": [*overrides, *data]},
        "classify_texts": {"REVIEWS": 80, "SHARES": (0.5,), "PRETRAINING_STEPS": 2, "STEPS": 2},
        "recall_against_state": {"MODELS": ("aft_simple", "linear_transformer"), "WIDTHS": (8,), "STEPS": 3},
    }


@pytest.mark.slow("runs a whole notebook")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(FAMILIES, "focused", FAMILIES["flash"])  # removed again at the end
    monkeypatch.setattr(keys.SECTIONS, "registered", dict(keys.SECTIONS))
    out = tmp_path / "runs"
    load_script("run_notebook", "docs/tools").execute(path, settings(tmp_path)[path.stem] | {"OUT": str(out)})
    assert (out / "table.md").exists()
    assert {png.name for png in out.glob("*.png")} == {png.name for png in (PICTURES / path.stem).glob("*.png")}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cells(path):
    script, text = load_script("write_notebooks", "docs/tools"), path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    current = script.text_of(script.with_shared_cells(notebook, path.name, script.repository()))
    assert text == current, "run python docs/tools/write_notebooks.py"
    cells = notebook["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "commit without outputs"
    assert cells[0]["source"][0].startswith("# ") and "**What you will see**\n" in cells[0]["source"]
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_badge_and_the_installation(monkeypatch, tmp_path):
    """If the repository has an address; written again without one, the notebook is as before."""
    script, path = load_script("write_notebooks", "docs/tools"), NOTEBOOKS[0]
    notebook = json.loads(path.read_text(encoding="utf-8"))
    addressed = script.with_shared_cells(script.with_shared_cells(notebook, path.name, ADDRESS), path.name, ADDRESS)
    title, badge, install = ("".join(cell["source"]) for cell in addressed["cells"][:3])
    assert title.startswith("# ") and f"/github/someone/something/blob/main/notebooks/{path.name})" in badge
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda words, check: commands.append(words))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT / "notebooks")
    exec(install, {})
    assert commands == [] and sys.path[-1] == str(ROOT)  # it is installed here
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    exec(install, {})
    clone, pip = commands
    root = str(tmp_path / "flash_lm_repository")
    assert clone[:2] == ["git", "clone"] and clone[-2:] == [ADDRESS, root]
    assert pip[1:4] == ["-m", "pip", "install"] and pip[-1] == f"{root}[plot]" and sys.path[-1] == root
    assert len(script.with_shared_cells(addressed, path.name, "")["cells"]) == len(addressed["cells"]) - 1


def test_the_installation_without_an_address(monkeypatch, tmp_path):
    script, path = load_script("write_notebooks", "docs/tools"), NOTEBOOKS[0]
    addressed = script.with_shared_cells(json.loads(path.read_text(encoding="utf-8")), path.name, "")
    install = "".join(addressed["cells"][1]["source"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    exec(install, {})
    assert sys.path[-1] == str(ROOT)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        exec(install, {})
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="in a copy of the repository"):
        exec(install, {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_imports_and_files_of_a_notebook_exist(path, monkeypatch):
    """A quick check; `test_notebook` runs the notebook."""
    monkeypatch.chdir(ROOT)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("flash_lm", "studies", "benchmarks"):
            exec(ast.unparse(node), {})
    for config in re.findall(r"load_config\(\"([^\"]+)\"", code):
        load_config(config, [])


@pytest.mark.parametrize("address", ["github.com/someone/something", "https://example.org/a/b", ADDRESS + "/"])
def test_an_address_that_colab_cannot_open(address, tmp_path, monkeypatch):
    script = load_script("write_notebooks", "docs/tools")
    (tmp_path / "pyproject.toml").write_text(f'[tool.flash_lm]\nrepository = "{address}"\n')
    monkeypatch.setattr(script, "ROOT", tmp_path)
    with pytest.raises(InputError, match="OWNER/NAME, or empty"):
        script.repository()


def test_a_notebook_runs_as_a_command(tmp_path):
    """With other settings, and its pictures copied."""
    out, notebook = tmp_path / "out", tmp_path / "small.ipynb"
    setting = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["OUT = '.'\n", "STEPS = 3"]}
    drawing = "import pathlib\npathlib.Path(OUT).mkdir()\npathlib.Path(OUT, f'{STEPS + 1}.png').write_text('x')"
    cells = [setting, {"cell_type": "code", "metadata": {}, "source": [drawing]}]
    notebook.write_text(json.dumps({"cells": cells}))
    main, pictures = load_script("run_notebook", "docs/tools").main, tmp_path / "pictures"
    main([str(notebook), f"--pictures={pictures}", "STEPS=5", f"OUT={out}"])
    assert [path.name for path in pictures.iterdir()] == ["6.png"]
    with pytest.raises(InputError, match="has no setting STEP"):
        main([str(notebook), "STEP=5"])
    with pytest.raises(InputError, match="NAME=VALUE"):
        main([str(notebook), "STEPS"])


def test_the_kept_pictures_are_small_and_shown():
    page = (PICTURES / "README.md").read_text(encoding="utf-8")
    kept = {str(png.relative_to(PICTURES)) for png in PICTURES.rglob("*.png")}
    assert kept == set(re.findall(r"!\[.+\]\((.+)\)", page)) and all(f"{path.stem}/" in page for path in NOTEBOOKS)
    assert all((PICTURES / name).stat().st_size < 150_000 for name in kept)
