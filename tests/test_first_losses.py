"""First losses, parameter paths and config hashes equal those of the golden files; see `first_losses.py`."""

import json

import pytest
from first_losses import HASHES, PARAMETERS, cells, first_losses, golden_losses, hashes, parameters

from flash_lm.config.registry import FAMILIES

LOSSES = golden_losses()
SHAPES = json.loads(PARAMETERS.read_text())
WRITE = "if the change is meant, write the golden files as tests/first_losses.py says, and say so in CHANGELOG.md"
QUICK = {"flash causal_lm", "seq2seq"}  # the others, in `make test-all`, compile one step each


def test_each_run_has_golden_losses():
    assert LOSSES.keys() == cells().keys(), WRITE


@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow("compiles a step of one more run"))
        for name in cells()
    ],
)
def test_first_losses(name):
    assert first_losses(cells()[name]) == pytest.approx(LOSSES.get(name), abs=1e-5), WRITE


@pytest.mark.parametrize("name", FAMILIES)
def test_paths_and_shapes_of_parameters(name):
    assert parameters(name) == SHAPES.get(name), WRITE


def test_hashes_of_configs():
    """A run whose hash has changed is not recognized when a study resumes."""
    assert hashes() == json.loads(HASHES.read_text()), WRITE
