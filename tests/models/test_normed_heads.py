"""Sums without a denominator: the norm of the heads and the gate after it, and the same layers without them."""

import jax
import numpy as np
import pytest
from oracles import sizes

from flash_lm.config.experiment import parse_model
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete
from models.cases import BATCH, LENGTH, assert_close, case, model_config, real_tokens, standard_segment_ids, tokens

READERS = ("gla", "gated_deltanet")
BARE = {"output_gate": "none", "head_norm": False}
each_reader = pytest.mark.parametrize("family", READERS)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        *((family, BARE) for family in READERS),
        ("gla", {"output_gate": "none"}),
        ("gated_deltanet", {"head_norm": False}),
    ],
    ids=str,
)
def test_layers_without_gate_or_norm_equal_their_equations(family, keys):
    model, ids = case(family, True, **keys), standard_segment_ids(family)
    logits, keep = model.logits(model.params, tokens(), ids), real_tokens(ids)
    assert_close(np.asarray(logits)[keep], model.oracle(ids)[keep], 1e-5)


@each_reader
def test_decoding_without_gate_and_norm(family):
    model, start = case(family, True, **BARE), 13
    expected = model.oracle(None)
    logits, state = model.prefill(model.params, tokens()[:, :start], model.init_state(), np.full(BATCH, start))
    assert_close(logits, expected[:, :start], 1e-5)
    for t in range(start, LENGTH):
        logits, state = model.step(model.params, tokens()[:, t], state)
        assert_close(logits, expected[:, t], 1e-5, f"token {t}")


@each_reader
@pytest.mark.parametrize("keys", [BARE, {"output_gate": "none"}, {"head_norm": False}], ids=str)
def test_parameters_and_flops(family, keys):
    """Those of the closed forms: what is left out has no parameters, and no weights are counted."""
    model, usual = case(family, True, **keys), case(family, True)
    lost = {part for part, key in (("gate", "output_gate"), ("gain", "head_norm")) if key in keys}
    mixer, whole = (x.params["layers"]["sublayer_0"] for x in (model, usual))
    assert set(whole) - set(mixer) == lost and set(mixer) < set(whole)
    assert sum(x.size for x in jax.tree.leaves(model.params)) == sizes.parameters(model.settings)
    assert model.abstract.flops_per_token(LENGTH) * LENGTH == pytest.approx(
        sizes.flops(model.settings, LENGTH), rel=1e-9
    )


@each_reader
def test_the_open_keys_are_the_usual_layer(family):
    usual = case(family, True, output_gate="silu", head_norm=True)
    assert usual.config == case(family, True).config


@pytest.mark.parametrize(("key", "value"), [("output_gate", "none"), ("head_norm", False)])
def test_families_without_these_refuse_the_keys(key, value):
    for family, row in FAMILIES.items():
        config = parse_model(model_config(family, "causal" in row.serves, **{key: value}))
        if family in READERS:
            assert complete(config).get(key) == value
            continue
        with pytest.raises(InputError, match=f"^model.{key}={value} has no meaning in {family}, .*: leave it open"):
            complete(config)
