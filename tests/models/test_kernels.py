"""Families with interpreted Pallas kernels, against their oracles and the form that XLA compiles."""

import functools

import numpy as np
import pytest
from oracles import families as oracle_families

from flash_lm.families.family import FAMILIES
from models.cases import PACKED, assert_close, case, real_tokens, tokens
from models.test_equivalences import assert_same, primitives

pytestmark = pytest.mark.representatives("flash", "linear_transformer")

CASES = [(family, causal) for family in FAMILIES for causal in oracle_families.FAMILIES[family].kernels]
each_case = pytest.mark.parametrize(("family", "causal"), CASES)


@functools.cache
def count_kernels(family, causal, **overrides) -> int:
    return primitives(case(family, causal, **overrides))["pallas_call"]


@each_case
def test_kernels_are_used(family, causal):
    """Otherwise the comparisons below would be trivial."""
    assert count_kernels(family, causal, kernels="pallas") > 0
    assert count_kernels(family, causal) == 0


@each_case
def test_logits_equal_the_oracle(family, causal):
    model, keep = case(family, causal, kernels="pallas"), real_tokens(PACKED)
    logits = model.logits(model.params, tokens(), PACKED)
    assert_close(np.asarray(logits)[keep], model.oracle(PACKED)[keep], 1e-5)


@pytest.mark.parametrize(
    ("family", "causal"),
    [pytest.param(*one, marks=() if one[1] else pytest.mark.slow("the bidirectional form")) for one in CASES],
)
def test_logits_and_gradients_are_those_of_xla(family, causal):
    assert_same(case(family, causal, kernels="pallas"), family, causal)


@pytest.mark.parametrize(
    ("family", "causal"),
    [one if one == ("flash", True) else pytest.param(*one, marks=pytest.mark.slow("another kernel")) for one in CASES],
)
def test_remat_products_saves_the_outputs_of_kernels(family, causal):
    none, products, full = (
        count_kernels(family, causal, kernels="pallas", **keys)
        for keys in ({}, {"remat": "products"}, {"remat": "full"})
    )
    assert none == products < full
