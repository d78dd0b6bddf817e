"""Every family's first losses and its parameters' paths are those of the golden files; see `first_losses.py`."""

import json

import pytest
from first_losses import cells, first_losses, parameters
from small import ROOT

from flash_lm.families.family import FAMILIES

GOLDEN = ROOT / "tests" / "golden"
LOSSES = {
    line["name"]: line["losses"] for line in map(json.loads, (GOLDEN / "first_losses.jsonl").read_text().splitlines())
}
PARAMETERS = json.loads((GOLDEN / "parameters.json").read_text())
WRITE = "if the change is meant, write the golden files again as tests/first_losses.py says, and say so in CHANGELOG.md"


def test_each_run_has_golden_losses():
    assert LOSSES.keys() == cells().keys(), WRITE


@pytest.mark.slow  # a compilation of the whole step for each run
@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.parametrize("name", cells())
def test_first_losses(name):
    assert first_losses(cells()[name]) == pytest.approx(LOSSES[name], abs=1e-5), WRITE


@pytest.mark.parametrize("name", FAMILIES)
def test_paths_and_shapes_of_parameters(name):
    assert parameters(name) == PARAMETERS[name], WRITE
