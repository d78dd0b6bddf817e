"""Facts about a family that are computed without running it, against a real model."""

import jax
import pytest
from flax import nnx

from flash_lm import build_model
from flash_lm.families.family import FAMILIES
from flash_lm.models.facts import facts
from models.cases import model_config


@pytest.mark.parametrize("name", ["transformer", "flash"])
def test_facts_are_those_of_the_model(name):
    config = model_config("performer", True)
    computed = facts(name, config, (16, 32), (16, 24))
    model = build_model(model_config(name, True), rngs=nnx.Rngs(0))
    assert computed.parameters == sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    for capacity, size in computed.state_bytes.items():
        assert size == sum(x.nbytes for x in jax.tree.leaves(model.init_state(1, capacity)))
    assert computed.flops[24] == model.flops_per_token(24)
    assert computed.state_grows == (name == "transformer")
    assert len(computed.sublayers) == len(FAMILIES[name].sublayers) and config.family == "performer"
