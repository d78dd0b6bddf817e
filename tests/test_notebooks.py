"""The notebooks from their first cell to their last, with small settings in place of their own."""

import json
import pathlib

import matplotlib as mpl
import pytest
from small import as_overrides, small_config, write_corpus

from flash_lm import schema
from flash_lm.models.family import FAMILIES

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"
pytestmark = pytest.mark.usefixtures("usual_promotion")


def settings(tmp_path: pathlib.Path) -> dict:
    """Of the cells that are tagged as parameters."""
    corpus = write_corpus(tmp_path / "corpus")
    config = small_config(corpus, tmp_path / "cache")
    own = [f"--config.{key}=" for key in ("model.family", "data.corpus", "data.path", "train.steps")]
    overrides = [word for word in as_overrides(config) if not word.startswith(tuple(own))]
    data = ["--config.data.corpus=text", f"--config.data.path={corpus}"]
    return {
        "quality_against_step_time": {
            "FAMILIES": ("transformer_plus_plus", "flash"),
            "CORPUS": corpus,
            "OVERRIDES": [*overrides, "--config.train.steps=12"],
        },
        "ablate_chunk_attention": {"STEPS": 12, "CHUNKS": (4,), "OVERRIDES": [*overrides, *data]},
        "add_a_family": {"STEPS": 12, "OVERRIDES": [*overrides, *data]},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_notebook(name, tmp_path, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS.parent)
    monkeypatch.setitem(FAMILIES, "cosformer", FAMILIES["flash"])  # so that they are gone again at the end
    monkeypatch.setattr(schema.SECTIONS, "there", dict(schema.SECTIONS))
    mpl.use("Agg")
    given = settings(tmp_path)[name] | {"OUT": str(tmp_path / "runs")}
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "notebooks are committed without outputs"
    names: dict = {"__name__": name}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", ()):
            exec(source, names)
            assert given.keys() <= names.keys(), "a setting that the notebook does not have"
            names |= given
        elif cell["cell_type"] == "code":
            exec(compile(source, f"{name}, cell {number}", "exec"), names)
    assert (tmp_path / "runs" / "table.md").exists()
